"""Sums that grow in place on a GPU: of gradients, and of the micro-batches of a training step."""

from twell_numba.device.gpu import DeviceArray, kernel
from twell_numba.device.gpu.language import (
    cuda,
    global_thread,
    grid_threads,
    load,
    nanoseconds,
    number,
    store,
)


def add_into(target: DeviceArray, source: DeviceArray) -> None:
    """Add an array to another of the same size, in place; their dtypes may differ."""
    _add(_add.blocks(target.size), target, source, target.size)


def or_into(target: DeviceArray, source: DeviceArray) -> None:
    """Set what is true in an array of bool in another of the same size, too."""
    _or(_or.blocks(target.size), target, source, target.size)


def add_time(target: DeviceArray) -> None:
    """Add the GPU's clock, in nanoseconds, to one number of float64, in place."""
    _add_time(1, target)


@kernel(threads=32)
def _add_time(target):
    if cuda.threadIdx.x == 0:
        store(target, 0, load(target, 0) + nanoseconds())


@kernel()
def _add(target, source, size):
    i = global_thread()
    while i < size:
        store(target, i, number(target, load(target, i) + load(source, i)))
        i += grid_threads()


@kernel()
def _or(target, source, size):
    i = global_thread()
    while i < size:
        if load(source, i) != 0:
            store(target, i, 1)
        i += grid_threads()
