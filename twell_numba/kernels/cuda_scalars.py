"""Single numbers on a GPU, which a recorded step has in the place of Python's.

A graph replays a kernel with the arguments it was recorded with. What changes from step to step, or
is known on the GPU only, is therefore an array of one number. Sums are in float64, over a number of
threads that depends on the size alone: the same bits in every run, on every GPU. Bound by memory:
they read every number once, 16 bytes at a time.
"""

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.gpu import DeviceArray, Stream, empty, kernel
from twell_numba.device.gpu.language import (
    block_sum,
    cuda,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.kernels.checks import require_shape
from twell_numba.kernels.cuda_vectors import load_eight
from twell_numba.kernels.device_checks import float_array, float_arrays

# Blocks among which a sum shares its numbers, at most.
MOST_PARTS = 2048


def scalar_on_gpu(
    name: str, value: float | DeviceArray, dtype: DTypeLike, beside: DeviceArray
) -> DeviceArray:
    """Return a number as an array of one, beside another array.

    Parameters
    ----------
    name : str
        For errors.
    value : float or DeviceArray of float32, shape (1,)
        An array is returned as it is.
    dtype : dtype
        Of the array made of a float, float32 or float64.
    beside : DeviceArray
        On whose GPU it is wanted.

    Raises
    ------
    TypeError, ValueError
        If an array is of another dtype or shape, or on another GPU.
    """
    if isinstance(value, DeviceArray):
        float_array(name, value, np.dtype(np.float32), beside)
        require_shape(name, value, (1,))  # type: ignore[arg-type]
        return value
    return filled(value, dtype, beside.stream)


def filled(value: float, dtype: DTypeLike, stream: Stream) -> DeviceArray:
    """Return an array of one number, written by a kernel: a copy could not be recorded."""
    array = empty(1, dtype, stream)
    fill(1, array, np.float64(value))
    return array


def sum_on_gpu(array: DeviceArray) -> DeviceArray:
    """Return the sum of all numbers of an array of floats: float64, shape (1,)."""
    return _sum(array, squares=False)


def sum_of_squares_on_gpu(array: DeviceArray) -> DeviceArray:
    """Return the sum of the squares of all numbers of an array of floats: float64, shape (1,)."""
    return _sum(array, squares=True)


def sum_into(array: DeviceArray, total: DeviceArray, *, squares: bool = False) -> None:
    """Write the sum of an array's numbers, or of their squares, to a float64 array of one."""
    parts = min(sum_eights.blocks(-(-array.size // 8)), MOST_PARTS)
    partial = empty(parts, np.float64, array.stream)
    is_aligned = int(array.pointer % 16 == 0)
    sum_eights(parts, array, partial, array.size, int(squares), is_aligned)
    sum_parts(1, partial, total, parts)


def _sum(array: DeviceArray, *, squares: bool) -> DeviceArray:
    float_arrays(array=array)
    total = empty(1, np.float64, array.stream)
    sum_into(array, total, squares=squares)
    return total


@kernel(threads=32)
def fill(array, value):
    """Write a number; for one block."""
    if cuda.threadIdx.x == 0:
        store(array, 0, value)


@kernel()
def sum_eights(array, partial, size, squares, is_aligned):
    """Write each block's sum of its numbers, or of their squares."""
    i = global_thread() * 8
    total = number(partial, 0)
    while i < size:
        whole = types.int64(i + 8 <= size) * is_aligned
        numbers = load_eight(array, 0, i, size, whole)
        for n in range(8):
            entry = types.float64(numbers[n])
            if squares != 0:
                entry *= entry
            total += entry
        i += grid_threads() * 8
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        store(partial, cuda.blockIdx.x, total)


@kernel()
def sum_parts(partial, total, parts):
    """Add up the blocks' sums; for one block."""
    part = number(partial, 0)
    i = types.int64(cuda.threadIdx.x)
    while i < parts:
        part += load(partial, i)
        i += cuda.blockDim.x
    part = block_sum(part)
    if cuda.threadIdx.x == 0:
        store(total, 0, part)
