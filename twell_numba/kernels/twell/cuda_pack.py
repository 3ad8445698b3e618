"""Packing on a GPU: the positive entries of a dense matrix, NaN included, as TwELL.

A warp packs a row of tiles, or one tile: each lane counts the entries of adjacent columns, a
prefix sum tells it where its entries go, so that columns ascend. Rows of which a tile overflows are
marked, a bit each, and listed, ascending.

Reads M x F numbers once, but is bound by its instructions: on an H200, for M = 16384, F = 5632 and
29 entries a row in bfloat16, 0.113 ms with a loop over what fires, 0.123 with one over all eight
columns of a lane, for any number of slots; reading alone would take 0.04.
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
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import (
    MOST_THREADS,
    ballot,
    block_prefix,
    count_bits,
    is_bit_set,
    lowest_bit,
    set_bit,
    warp_prefix,
    warp_prefix_of_few,
)

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
def pack_rows(gate, values, columns, counts, overflows, rows, neurons, tiles, slots):
    """Pack rows in tiles of 256 that can be read eight numbers at a time; a warp takes a row.

    Rows of which a tile overflows are marked, and their counts are 0.
    """
    lane = global_thread() % 32
    row = global_thread() // 32
    column = lane * 8
    while row < rows:
        start = row * neurons
        is_full = 0
        following = load_eight(gate, start, column, neurons, 1)  # 0 past the row's end
        for t in range(tiles):
            eight = following
            following = load_eight(gate, start, (t + 1) * TILE_OF_A_WARP + column, neurons, 1)
            firing = types.int32(0)  # a bit for each
            for i in range(8):
                if not eight[i] <= 0:
                    firing = types.int32(firing | (1 << i))
            count = types.int32(count_bits(firing))
            total = types.int32(0)
            if ballot(count) != 0:
                before, total = warp_prefix_of_few(count)
                if total > slots:
                    is_full = 1
                elif count > 0:
                    place = (row * tiles + t) * slots + before
                    while firing != 0:
                        i = lowest_bit(firing)
                        value = load(gate, start + t * TILE_OF_A_WARP + column + i)
                        store(values, place, value)
                        store(columns, place, column + i)
                        place += 1
                        firing = types.int32(firing & (firing - 1))
            if lane == 0:
                store(counts, row * tiles + t, total)
        if is_full == 1 and lane == 0:
            set_bit(overflows, row // 32, row % 32)
            for t in range(tiles):
                store(counts, row * tiles + t, 0)
        row += grid_threads() // 32


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
            set_bit(overflows, row // 32, row % 32)
            for t in range(tiles):
                store(counts, start + t, 0)
        row += grid_threads()


@device_function
def list_marked_rows(overflows, tail_rows, tail_count, words):
    """List the rows whose bits are set in ``words`` words; the threads of one block do."""
    share = (words + cuda.blockDim.x - 1) // cuda.blockDim.x
    thread = types.int64(cuda.threadIdx.x)
    stop = min(words, (thread + 1) * share)
    count = types.int64(0)
    word = thread * share
    while word < stop:
        count += count_bits(load(overflows, word))
        word += 1
    place, total = block_prefix(count)
    word = thread * share
    while word < stop:
        if load(overflows, word) != 0:
            for row in range(word * 32, word * 32 + 32):
                if is_bit_set(overflows, row) == 1:
                    store(tail_rows, place, row)
                    place += 1
        word += 1
    if thread == 0:
        store(tail_count, 0, total)


@kernel(threads=MOST_THREADS)
def list_tail(overflows, tail_rows, tail_count, words):
    """List the rows whose bits are set in ``words`` words; for one block."""
    list_marked_rows(overflows, tail_rows, tail_count, words)


def list_tail_rows(packed: DeviceActivations) -> None:
    """List the rows of the tail that are marked; nothing waits."""
    overflows = packed.overflows
    assert overflows is not None, "no activations of few tokens"
    if overflows.size:
        list_tail(1, overflows, packed.tail_rows, packed.tail_count, overflows.size)


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
    rows, neurons, tile, tiles, slots, has_gate,
):  # fmt: skip
    """Count the packed entries of each row and add them up; a warp takes a row.

    Of a row that overflows the numbers of ``gate``, if there is one.
    """
    lane = global_thread() % 32
    row = global_thread() // 32
    while row < rows:
        count = types.int32(0)
        total = number(values, 0)
        if is_bit_set(overflows, row) == 1:
            neuron = lane if has_gate == 1 else neurons
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
