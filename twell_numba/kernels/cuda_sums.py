"""Sums that grow from one micro-batch of a training step to the next, on a GPU."""

from twell_numba.device.gpu import DeviceArray, kernel
from twell_numba.device.gpu.language import (
    cuda,
    global_thread,
    grid_threads,
    load,
    nanoseconds,
    store,
)


def add_into(target: DeviceArray, source: DeviceArray) -> None:
    """Add an array to another of the same size, in place."""
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
        store(target, i, load(target, i) + load(source, i))
        i += grid_threads()


@kernel()
def _or(target, source, size):
    i = global_thread()
    while i < size:
        if load(source, i) != 0:
            store(target, i, 1)
        i += grid_threads()
