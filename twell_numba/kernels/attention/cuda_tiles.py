"""Products of tiles, for the attention kernels: blocks of 64 threads, tiles of 32 x 32 and 32 x 64.

A thread holds 4 x 4 numbers of the one and 4 x 8 of the other, of the same four rows: ``row``,
``row + 8``, ... with ``row = thread // 8``, and the columns ``column``, ``column + 8``, ... with
``column = thread % 8``. So the eight threads of a row are neighbours in a warp.
"""

from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    load,
    store,
    types,
)

SIDE = 8
THREADS = SIDE * SIDE
TILE = 32  # queries, and keys
SHARE = TILE // SIDE  # rows of a thread
PART = SHARE * SHARE
COLUMNS = 64  # of the head width: a block computes so many of a result's
WIDE_SHARE = COLUMNS // SIDE
WIDE_PART = SHARE * WIDE_SHARE
DEPTH = 16  # terms of a product that are in shared memory at a time
PITCH = TILE + 1  # so that a column of a tile lies in different banks
PANEL = DEPTH * PITCH
WEIGHTS = TILE * PITCH
VALUES = TILE * COLUMNS
# Shared memory is indexed with uint64: a signed index could count from the end, and is tested.


@device_function
def _fill(array, base, step, first, end, start, width, panel):
    """Copy 16 columns of 32 rows, transposed, with zeros past the ends."""
    i = types.int64(cuda.threadIdx.x)
    while i < TILE * DEPTH:
        row = i // DEPTH
        column = i % DEPTH
        target = types.uint64(column * PITCH + row)
        panel[target] = 0
        if first + row < end and start + column < width:
            panel[target] = load(array, base + (first + row) * step + start + column)
        i += THREADS


@device_function
def products(
    a, a_base, a_step, a_first, a_end, b, b_base, b_step, b_first, b_end, width, left, right, sums
):
    """Set sums to the products of 32 rows of ``a`` with 32 rows of ``b``.

    Row r of an array begins at ``base + r * step``; those from ``end`` on count as zeros. ``left``
    and ``right`` are shared memory of PANEL numbers, ``sums`` a thread's own of PART.
    """
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
    for i in range(PART):
        sums[i] = 0
    start = types.int64(0)
    while start < width:
        _fill(a, a_base, a_step, a_first, a_end, start, width, left)
        _fill(b, b_base, b_step, b_first, b_end, start, width, right)
        cuda.syncthreads()
        for d in range(min(types.int64(DEPTH), width - start)):
            for i in range(SHARE):
                factor = left[types.uint64(d * PITCH + row + i * SIDE)]
                for j in range(SHARE):
                    other = right[types.uint64(d * PITCH + column + j * SIDE)]
                    sums[i * SHARE + j] += factor * other
        cuda.syncthreads()
        start += DEPTH


@device_function
def take_columns(array, base, step, first, end, start, width, values):
    """Copy 64 columns of 32 rows to shared memory (VALUES numbers), with zeros past the ends."""
    i = types.int64(cuda.threadIdx.x)
    while i < VALUES:
        row = i // COLUMNS
        column = i % COLUMNS
        target = types.uint64(i)
        values[target] = 0
        if first + row < end and start + column < width:
            values[target] = load(array, base + (first + row) * step + start + column)
        i += THREADS


@device_function
def add_combinations(weights, values, count, sums):
    """Add weights (32 x 32, with PITCH) times values (32 x 64) to a thread's WIDE_PART sums.

    Only the first ``count`` columns of weights and rows of values.
    """
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
    for r in range(min(types.int64(TILE), count)):
        for i in range(SHARE):
            weight = weights[types.uint64((row + i * SIDE) * PITCH + r)]
            for j in range(WIDE_SHARE):
                value = values[types.uint64(r * COLUMNS + column + j * SIDE)]
                sums[i * WIDE_SHARE + j] += weight * value


@device_function
def store_columns(sums, array, base, step, first, end, start, width):
    """Write 32 rows by 64 columns, of which a thread has WIDE_PART, but not past the ends."""
    row = types.int64(cuda.threadIdx.x) // SIDE
    column = types.int64(cuda.threadIdx.x) % SIDE
    for i in range(SHARE):
        place = first + row + i * SIDE
        for j in range(WIDE_SHARE):
            d = start + column + j * SIDE
            if place < end and d < width:
                store(array, base + place * step + d, sums[i * WIDE_SHARE + j])


@device_function
def row_maximum(value):
    """Return the largest of the numbers of a row's eight threads; NaN is passed over."""
    for shift in range(3):
        other = cuda.shfl_xor_sync(FULL_WARP, value, 4 >> shift)
        value = other if other > value else value
    return value


@device_function
def row_sum(value):
    """Return the sum over a row's eight threads, the same bits in each."""
    for shift in range(3):
        value += cuda.shfl_xor_sync(FULL_WARP, value, 4 >> shift)
    return value
