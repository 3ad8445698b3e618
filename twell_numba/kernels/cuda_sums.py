"""Sums that grow in place on a GPU: of gradients, and of the micro-batches of a training step."""

from twell_numba.device.gpu import DeviceArray, kernel
from twell_numba.device.gpu.language import (
    arithmetic_type,
    cuda,
    global_thread,
    grid_threads,
    load,
    nanoseconds,
    number,
    store,
    types,
)

# Of the blocks that sum columns: 32 columns each, and so many rows at once.
SUM_THREADS = 1024


def add_into(target: DeviceArray, source: DeviceArray) -> None:
    """Add an array to another of the same size, in place; their dtypes may differ."""
    _add(_add.blocks(target.size), target, source, target.size)


def or_into(target: DeviceArray, source: DeviceArray) -> None:
    """Set what is true in an array of bool in another of the same size, too."""
    _or(_or.blocks(target.size), target, source, target.size)


def add_column_sums(partial: DeviceArray, target: DeviceArray) -> None:
    """Add the sum of each column to an array, in place; in an order that shapes alone decide.

    Parameters
    ----------
    partial : DeviceArray of float32 or float64, shape (chunks, N)
        Sums over some rows each, of what a gradient is the sum of over all rows.
    target : DeviceArray, shape (N,)
    """
    rows, width = partial.shape
    _add_column_sums(-(-width // 32), partial, target, rows, width)


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


@kernel(threads=SUM_THREADS)
def _add_column_sums(partial, target, rows, width):
    """A block takes 32 columns; a warp of it every so many rows, four at once."""
    sums = cuda.shared.array(SUM_THREADS, arithmetic_type(partial))
    lane = types.int64(cuda.threadIdx.x % 32)
    warp = types.int64(cuda.threadIdx.x // 32)
    warps = types.int64(cuda.blockDim.x // 32)
    column = cuda.blockIdx.x * types.int64(32) + lane
    total = number(partial, 0)
    if column < width:
        row = warp
        while row < rows:
            part = load(partial, row * width + column)
            for ahead in range(1, 4):
                later = row + ahead * warps
                if later < rows:
                    part += load(partial, later * width + column)
            total += part
            row += 4 * warps
    sums[cuda.threadIdx.x] = total
    cuda.syncthreads()
    if warp == 0 and column < width:
        for other in range(1, warps):
            total += sums[other * 32 + lane]
        store(target, column, load(target, column) + total)
