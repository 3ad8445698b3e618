"""Sums over all numbers before each one, on a GPU.

    starts[i] = numbers[0] + ... + numbers[i - 1],   i = 0 .. n

The numbers are cut into parts, a block each: sums of the parts, sums over the parts before, then
the sums inside the parts. Bound by memory: the numbers are read twice.
"""

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel, zeros
from twell_numba.device.gpu.language import cuda, load, store, types
from twell_numba.formats.index_width import index_dtype
from twell_numba.kernels.twell.cuda_language import MOST_THREADS, block_prefix

# Numbers of a block.
PART = 2048


def prefix_sums(numbers: DeviceArray, dtype: np.dtype | None = None) -> tuple[DeviceArray, int]:
    """Return where the items of each group start, and how many there are in all groups.

    Parameters
    ----------
    numbers : DeviceArray of integers, shape (n,)
        Items of each group.
    dtype : dtype, optional
        Of the starts. Otherwise the narrowest of index arrays that holds the total, which is then
        read back: that waits for the GPU.

    Returns
    -------
    starts : DeviceArray, shape (n + 1,)
    total : int
        -1 where it was not read.
    """
    count, stream = numbers.size, numbers.stream
    if count == 0:
        return zeros(1, index_dtype(0) if dtype is None else dtype, stream), 0
    parts = -(-count // PART)
    sums = empty(parts + 1, np.int64, stream)
    sum_parts(parts, numbers, sums, count)
    scan_sums(1, sums, parts)
    total = -1
    if dtype is None:
        total = int(sums[parts:].to_numpy()[0])
        dtype = index_dtype(total)
    starts = empty(count + 1, dtype, stream)
    scan_parts(parts, numbers, sums, starts, count)
    return starts, total


@kernel(threads=MOST_THREADS)
def sum_parts(numbers, sums, count):
    """Write the sum of each part; for a block a part."""
    part = types.int64(cuda.blockIdx.x)
    share = (PART + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = part * PART + types.int64(cuda.threadIdx.x) * share
    total = types.int64(0)
    for i in range(first, min(first + share, min(count, (part + 1) * PART))):
        total += types.int64(load(numbers, i))
    total = block_prefix(total)[1]
    if cuda.threadIdx.x == 0:
        store(sums, part, total)


@kernel(threads=MOST_THREADS)
def scan_sums(sums, parts):
    """Replace the sums of parts by sums over the parts before, the total last; for one block."""
    share = (parts + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = types.int64(cuda.threadIdx.x) * share
    end = min(parts, first + share)
    own = types.int64(0)
    for i in range(first, end):
        own += load(sums, i)
    before, total = block_prefix(own)
    for i in range(first, end):
        number = load(sums, i)
        store(sums, i, before)
        before += number
    if cuda.threadIdx.x == 0:
        store(sums, parts, total)


@kernel(threads=MOST_THREADS)
def scan_parts(numbers, sums, starts, count):
    """Write the sums over the numbers before each one; for a block a part."""
    part = types.int64(cuda.blockIdx.x)
    share = (PART + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = part * PART + types.int64(cuda.threadIdx.x) * share
    end = min(first + share, min(count, (part + 1) * PART))
    own = types.int64(0)
    for i in range(first, end):
        own += types.int64(load(numbers, i))
    before = block_prefix(own)[0] + load(sums, part)
    for i in range(first, end):
        store(starts, i, before)
        before += types.int64(load(numbers, i))
        if i == count - 1:
            store(starts, count, before)
