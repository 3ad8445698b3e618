"""Products of a CSR matrix with many columns, on a GPU with much shared memory.

    A @ X (M, N)   and   the values of Y @ X.T at A's entries          A (M, K), X (K, N) or (K, D)

A gather reads a row of X for every entry of A. Here a block of threads holds some columns of X, all
K rows of them, in shared memory, and gathers from there; X itself is read once. Each thread takes
eight columns of one row of A at a time, or eight threads share the entries of a row. Sums are in
float32 and in an order that depends on the shapes alone.

Bound by shared memory: every entry of A reads its row of X from it once.
"""

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
)
from twell_numba.device.gpu.tensor_cores import pointer_into
from twell_numba.formats import CSRMatrix
from twell_numba.kernels.cuda_vectors import (
    add_unless_zero,
    eight_zeros,
    load_aligned,
    load_eight,
    store_aligned,
    store_eight,
)
from twell_numba.kernels.device_checks import arithmetic_dtype

HELD_BYTES = 216 * 1024
THREADS = 1024
# Eights of columns that a block holds, at most.
MOST_EIGHTS = 6
# Parts of a sampled product, each added up by one block; and the threads that share a row.
PARTS = 128
ROW_THREADS = 8
# Columns, and entries for each row of X from which on holding X is worth it.
FEWEST_COLUMNS, FEWEST_USES = 128, 4


def eights_held(A: CSRMatrix, *dense: DeviceArray) -> int:
    """Return how many eights of columns of the last operand fit in shared memory; 0 for no use.

    ``dense`` are the dense operands and results, of as many columns.
    """
    X, inner = dense[-1], A.shape[1]
    columns = X.shape[1]
    fits = (
        X.dtype.itemsize <= 4
        and columns >= FEWEST_COLUMNS
        and all(array.shape[1] % 8 == 0 and array.pointer % 16 == 0 for array in dense)
        and A.data.size >= FEWEST_USES * inner > 0
        and X.stream.gpu.shared_memory_per_block >= HELD_BYTES
    )
    return min(HELD_BYTES // (inner * 8 * X.dtype.itemsize), MOST_EIGHTS) if fits else 0


def gather_columns(A: CSRMatrix, X: DeviceArray, out: DeviceArray, eights: int) -> None:
    """Overwrite ``out`` with A @ X."""
    rows, inner = A.shape
    columns = X.shape[1]
    tiles = -(-columns // (8 * eights))
    gather_held(
        min(X.stream.gpu.multiprocessors, tiles * rows),
        A.data, A.indices, A.indptr, X, out, rows, inner, columns, eights,
    )  # fmt: skip


def add_sampled(
    A: CSRMatrix, Y: DeviceArray, X: DeviceArray, gradient: DeviceArray, eights: int
) -> None:
    """Add the values of Y @ X.T at A's entries to ``gradient``."""
    (rows, inner), columns = A.shape, X.shape[1]
    tiles = -(-columns // (8 * eights))
    parts = min(PARTS, tiles)
    partial = empty((parts, A.data.size), arithmetic_dtype(X.dtype), X.stream)
    sample_held(parts, A.indices, A.indptr, Y, X, partial, rows, inner, columns, eights)
    add_parts(add_parts.blocks(A.data.size), partial, gradient, A.data.size, parts)


@device_function
def hold_columns(held, X, inner, columns, first_column, across):
    """Copy some columns of X to shared memory; 0 past the last."""
    i = types.int32(cuda.threadIdx.x)
    while i < inner * across:
        column = first_column + i % across * 8
        numbers = load_eight(X, i // across * columns, column, columns, 1)
        store_eight(held, 0, types.int64(i) * 8, inner * across * 8, numbers, 1)
        i += types.int32(cuda.blockDim.x)
    cuda.syncthreads()


@kernel(threads=THREADS, shared_memory=HELD_BYTES)
def gather_held(data, indices, indptr, X, out, rows, inner, columns, eights):
    """Compute A @ X; a block takes a run of pairs of some columns and a row."""
    held = pointer_into(cuda.shared.array(0, types.uint32), X)
    thread = types.int32(cuda.threadIdx.x)
    across = types.int32(eights)
    groups = types.int32(cuda.blockDim.x) // across
    eight = thread % across
    tiles = (columns + 8 * eights - 1) // (8 * eights)
    item = tiles * rows * cuda.blockIdx.x // cuda.gridDim.x
    end = tiles * rows * (cuda.blockIdx.x + 1) // cuda.gridDim.x
    while item < end:
        first_column = item // rows * 8 * eights
        column = first_column + eight * 8
        hold_columns(held, X, inner, columns, first_column, across)
        row = item % rows + thread // across
        last_row = min(rows, item % rows + end - item)
        item += last_row - item % rows
        while row < last_row and thread < groups * across and column < columns:
            sums = eight_zeros(out)
            for k in range(types.int64(load(indptr, row)), types.int64(load(indptr, row + 1))):
                place = (types.int32(load(indices, k)) * across + eight) * 8
                sums = add_unless_zero(sums, load(data, k), load_aligned(held, place))
            store_aligned(out, row * columns + column, sums)
            row += groups
        cuda.syncthreads()  # the next columns are written to the same place


@kernel(threads=THREADS, shared_memory=HELD_BYTES)
def sample_held(indices, indptr, Y, X, partial, rows, inner, columns, eights):
    """Add up y[row] * x[index] over a part of the columns, for each entry; a part a block."""
    held = pointer_into(cuda.shared.array(0, types.uint32), X)
    thread = types.int32(cuda.threadIdx.x)
    across = types.int32(eights)
    tiles = (columns + 8 * eights - 1) // (8 * eights)
    entries = types.int64(load(indptr, rows))
    first = tiles * cuda.blockIdx.x // cuda.gridDim.x
    start = entries * cuda.blockIdx.x
    for tile in range(first, tiles * (cuda.blockIdx.x + 1) // cuda.gridDim.x):
        first_column = tile * 8 * eights
        hold_columns(held, X, inner, columns, first_column, across)
        row = types.int64(thread // ROW_THREADS)
        while row < rows:
            k = types.int64(load(indptr, row)) + thread % ROW_THREADS
            end = types.int64(load(indptr, row + 1))
            while k < end:
                place = types.int32(load(indices, k)) * across * 8
                sums = eight_zeros(partial)
                for eight in range(across):
                    column = first_column + eight * 8
                    y = load_eight(Y, row * columns, column, columns, 1)
                    x = load_aligned(held, place + eight * 8)
                    sums = (
                        sums[0] + x[0] * y[0],
                        sums[1] + x[1] * y[1],
                        sums[2] + x[2] * y[2],
                        sums[3] + x[3] * y[3],
                        sums[4] + x[4] * y[4],
                        sums[5] + x[5] * y[5],
                        sums[6] + x[6] * y[6],
                        sums[7] + x[7] * y[7],
                    )
                total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (
                    (sums[4] + sums[5]) + (sums[6] + sums[7])
                )
                if tile > first:
                    total += load(partial, start + k)
                store(partial, start + k, total)
                k += ROW_THREADS
            row += types.int32(cuda.blockDim.x) // ROW_THREADS
        cuda.syncthreads()


@kernel()
def add_parts(partial, gradient, size, parts):
    """Add the parts' sums to a gradient."""
    i = global_thread()
    while i < size:
        total = load(partial, i)
        for part in range(1, parts):
            total += load(partial, part * size + i)
        store(gradient, i, number(gradient, load(gradient, i) + total))
        i += grid_threads()
