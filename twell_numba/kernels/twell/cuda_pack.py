"""Packing on a GPU: the positive entries of a dense matrix, NaN included, as TwELL.

A warp packs a tile of a row: each lane counts the entries of adjacent columns, a prefix sum tells
it where its entries go, so that columns ascend. Rows of which a tile overflows are listed,
ascending.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.kernels.cuda_vectors import load_eight
from twell_numba.kernels.twell.cuda_language import MOST_THREADS, block_prefix, warp_prefix

# Columns of a tile that a warp takes with one load, eight a lane.
TILE_OF_A_WARP = 256


@device_function
def put_if_it_fires(values, columns, place, value, column):
    """Store an entry unless it is at most 0; return the place of the next one."""
    if not value <= 0:
        store(values, place, value)
        store(columns, place, column)
        place += 1
    return place


@kernel()
def pack_tiles(gate, values, columns, counts, rows, neurons, tile, tiles, slots):
    """Pack every tile that has room for its entries, and count the entries of all."""
    lane = global_thread() % 32
    item = global_thread() // 32
    share = (tile + 31) // 32
    while item < rows * tiles:
        first = item % tiles * tile
        start = item // tiles * neurons + first
        stop = min(min(tile, neurons - first), (lane + 1) * share)
        count = 0
        column = lane * share
        while column < stop:
            if not load(gate, start + column) <= 0:
                count += 1
            column += 1
        place, total = warp_prefix(count)
        if total <= slots:
            place += item * slots
            column = lane * share
            while column < stop:
                value = load(gate, start + column)
                place = put_if_it_fires(values, columns, place, value, column)
                column += 1
        if lane == 0:
            store(counts, item, total)
        item += grid_threads() // 32


@kernel()
def pack_aligned_tiles(gate, values, columns, counts, rows, neurons, tiles, slots):
    """Do the same for tiles of 256, of rows that can be read eight numbers at a time."""
    lane = global_thread() % 32
    item = global_thread() // 32
    column = lane * 8
    while item < rows * tiles:
        first = item % tiles * TILE_OF_A_WARP
        start = item // tiles * neurons + first
        eight = load_eight(gate, start, column, neurons - first, 1)  # 0 past the row's end
        count = 0
        for i in range(8):
            if not eight[i] <= 0:
                count += 1
        place, total = warp_prefix(count)
        if total <= slots:
            place += item * slots
            for i in range(8):
                place = put_if_it_fires(values, columns, place, eight[i], column + i)
        if lane == 0:
            store(counts, item, total)
        item += grid_threads() // 32


@kernel()
def mark_tail(counts, overflows, rows, tiles, slots):
    """Mark the rows of which a tile overflows, and set their counts to 0."""
    row = global_thread()
    while row < rows:
        start = row * tiles
        is_full = 0
        for t in range(tiles):
            if load(counts, start + t) > slots:
                is_full = 1
        if is_full == 1:
            for t in range(tiles):
                store(counts, start + t, 0)
        store(overflows, row, is_full)
        row += grid_threads()


@kernel(threads=MOST_THREADS)
def list_tail(overflows, tail_rows, tail_count, rows):
    """List the marked rows; for one block."""
    share = (rows + cuda.blockDim.x - 1) // cuda.blockDim.x
    thread = types.int64(cuda.threadIdx.x)
    stop = min(rows, (thread + 1) * share)
    count = 0
    row = thread * share
    while row < stop:
        if load(overflows, row) != 0:
            count += 1
        row += 1
    place, total = block_prefix(count)
    row = thread * share
    while row < stop:
        if load(overflows, row) != 0:
            store(tail_rows, place, row)
            place += 1
        row += 1
    if thread == 0:
        store(tail_count, 0, total)


@kernel()
def copy_rows(source, rows, target, count, width):
    """Copy ``source[rows[i]]`` to ``target[i]`` for i < count."""
    item = global_thread()
    while item < count * width:
        row = types.int64(load(rows, item // width))
        store(target, item, load(source, row * width + item % width))
        item += grid_threads()


@kernel()
def count_rows(
    values, columns, counts, gate, overflows, nonzeros, absolute_sums, fired,
    rows, neurons, tile, tiles, slots,
):  # fmt: skip
    """Count the packed entries of each row and add them up; a warp takes a row."""
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int32(0)
        total = number(values, 0)
        if load(overflows, row) != 0:
            neuron = lane
            while neuron < neurons:
                value = load(gate, row * neurons + neuron)
                if not value <= 0:
                    total += value
                    count = types.int32(count + 1)
                    store(fired, neuron, 1)
                neuron += 32
        else:
            t = lane
            while t < tiles:
                start = (row * tiles + t) * slots
                for place in range(start, start + load(counts, row * tiles + t)):
                    total += load(values, place)
                    count = types.int32(count + 1)
                    store(fired, t * tile + types.int64(load(columns, place)), 1)
                t += 32
        count = warp_sum(count)
        total = warp_sum(total)
        if lane == 0:
            store(nonzeros, row, count)
            store(absolute_sums, row, total)
        row += grid_threads() // 32
