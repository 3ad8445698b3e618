"""Dense products in a kernel of our own, for where cuBLASLt is missing or has no algorithm.

    C = op(A) op(B)  or  C += op(A) op(B)                    op: as it is, or transposed

A block of 64 threads takes a tile of 32 x 32 numbers of C at a time, a thread 4 x 4 of them, and
goes through the sum in order, 16 terms at a time through shared memory: the same bits in every run,
on every GPU. Sums are in float32, or float64 for float64.
"""

from twell_numba.device.gpu.array import DeviceArray
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    device_function,
    load,
    store,
    types,
)
from twell_numba.device.gpu.launch import kernel

TILE = 32
DEPTH = 16  # terms of the sums that are in shared memory at a time
SIDE = 8  # threads along a side of the tile
SHARE = TILE // SIDE  # numbers along a side of a thread's part
PART = SHARE * SHARE
PITCH = TILE + 1  # of a row of shared memory, so that a column lies in different banks
PANEL = DEPTH * PITCH
# Shared memory is indexed with uint64: a signed index could count from the end, and is tested.


def tiled_product(
    a: DeviceArray,
    b: DeviceArray,
    out: DeviceArray,
    inner: int,
    *,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
) -> None:
    """Write the product of ``a`` and ``b`` to ``out``, or add it; see ``gemm.matmul``.

    Parameters
    ----------
    a, b, out : DeviceArray
        Two-dimensional, with at least one element each.
    inner : int
        Terms of each sum, K.
    """
    rows, columns = out.shape
    a_strides = (1, rows) if transpose_a else (inner, 1)
    b_strides = (1, inner) if transpose_b else (columns, 1)
    tiles = -(-rows // TILE) * -(-columns // TILE)
    _product(
        min(tiles, 2**31 - 1),
        a, b, out, rows, columns, inner, *a_strides, *b_strides, int(accumulate),
    )  # fmt: skip


@device_function
def _fill(matrix, first, end, step, first_term, inner, term_step, panel):
    """Copy 32 rows of A (columns of B) by 16 terms to shared memory, with zeros past the ends."""
    i = types.int64(cuda.threadIdx.x)
    while i < TILE * DEPTH:
        # neighbouring threads read what is next to each other in memory
        if term_step == 1:
            item = i // DEPTH
            term = i % DEPTH
        else:
            item = i % TILE
            term = i // TILE
        target = types.uint64(term * PITCH + item)
        panel[target] = 0
        if first + item < end and first_term + term < inner:
            place = (first + item) * step + (first_term + term) * term_step
            panel[target] = load(matrix, place)
        i += SIDE * SIDE


@kernel(threads=SIDE * SIDE)
def _product(a, b, out, rows, columns, inner, a_row, a_term, b_term, b_column, accumulate):
    left = cuda.shared.array(PANEL, arithmetic_type(a))
    right = cuda.shared.array(PANEL, arithmetic_type(a))
    sums = cuda.local.array(PART, arithmetic_type(a))
    thread = types.int64(cuda.threadIdx.x)
    row = thread // SIDE
    column = thread % SIDE
    tiles_across = (columns + TILE - 1) // TILE
    tiles = (rows + TILE - 1) // TILE * tiles_across
    tile = types.int64(cuda.blockIdx.x)
    while tile < tiles:
        first_row = tile // tiles_across * TILE
        first_column = tile % tiles_across * TILE
        for i in range(PART):
            sums[i] = 0
        first_term = types.int64(0)
        while first_term < inner:
            _fill(a, first_row, rows, a_row, first_term, inner, a_term, left)
            _fill(b, first_column, columns, b_column, first_term, inner, b_term, right)
            cuda.syncthreads()
            for term in range(DEPTH):
                for i in range(SHARE):
                    factor = left[types.uint64(term * PITCH + row + i * SIDE)]
                    for j in range(SHARE):
                        other = right[types.uint64(term * PITCH + column + j * SIDE)]
                        sums[i * SHARE + j] += factor * other
            cuda.syncthreads()
            first_term += DEPTH
        for i in range(SHARE):
            for j in range(SHARE):
                m = first_row + row + i * SIDE
                n = first_column + column + j * SIDE
                if m < rows and n < columns:
                    total = sums[i * SHARE + j]
                    if accumulate:
                        total += load(out, m * columns + n)
                    store(out, m * columns + n, total)
        tile += cuda.gridDim.x
