"""Which neurons blocks of tokens share, on a GPU.

    U_b = neurons that fire for any of the tokens order[128 b] to order[128 b + 127], ascending

and the entries of a block's tokens side by side, each with where in U_b its neuron is.

A block of threads makes the lists of a block of tokens, in shared memory: a bit for each neuron
that fires; how many are set below an entry's own is its position. The same lists in every run.
Another kernel puts what is to be multiplied in order, what takes longest first, for blocks that
stay and take one item after the other, and lists the rows of the tail.

Bound by the latency of few dependent steps, and by the block with most entries, of which some of
groups have many more than others. On an H200, M 16384, F 5632, both kernels, for trained layers of
16, 24 and 34 entries a row, in us: 24, 28 and 33, of which the second takes 7. With starts of
parts written entry by entry, and divisions, 29, 31 and 43. Versions before, in the order of the
text, for 24 and 82 entries a row: columns read twice, an entry at a time, and blocks compared by
all threads, 68 and 95; a warp takes a row, 70 and 93; entries first listed in shared memory, then
taken one a thread, in 64-bit numbers, 55 and 91; with 512 threads 37 and 80; one value read at a
time, neurons and places of entries in 8 bytes instead of 4, 26 and 68.
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    intrinsic,
    load,
    store,
    types,
)
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import count_bits, prefix_of_block, set_bit
from twell_numba.kernels.twell.cuda_pack import list_marked_rows
from twell_numba.kernels.twell.entry_transpose import set_shared_bit

_i64 = ir.IntType(64)

TOKENS = 128  # of a block
ROW_STARTS = TOKENS + 1
NEURONS = 256  # of an item, at most
PANEL = 64  # columns of h that lie together
THREADS = 1024
MOST_WORDS = 1024  # of 32 neurons, in shared memory
# Neurons can be of 15 bits, as can places in a row; slots of a tile of 9, rows of a block of 7.
MOST_NEURONS = 32 * MOST_WORDS
SLOT_BITS, ROW_SHIFT = 9, 24
MOST_SLOTS = 1 << SLOT_BITS  # of a tile
ENTRIES_OF_COST = 16  # as many take as long as one of a part's neurons
ENTRIES = 32 * 1024  # of a block that shares, at most; in shared memory
AHEAD = 4  # entries of which a thread reads the values before it writes them


def _half_bits(typing_context, pointer, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        return builder.zext(builder.load(builder.gep(arguments[0], [position])), _i64)

    return types.int64(pointer, index), generate


def _half_bits_in_python(pointer, index, definition=_half_bits):
    """What half_bits does; see below."""
    return types.int64(np.float32(load(pointer, index)).view(np.uint32) >> 16)


# half_bits(pointer, index) returns a bfloat16 number as it is, in the low 16 bits of an integer.
# The plain function is what tests without a GPU run.
half_bits = intrinsic(_half_bits)
half_bits.py_func = _half_bits_in_python


@dataclass
class SharedNeurons:
    """The neurons of each block of tokens, and the entries of its rows.

    Attributes
    ----------
    room : int
        Neurons that a block can have, a multiple of 256.
    tokens : DeviceArray of int32, shape (M,)
        All tokens, 128 of a block side by side.
    neurons : DeviceArray of int32, shape (blocks, room)
    counts : DeviceArray of int32, shape (blocks,)
        Neurons of each block, at least 1; 0 where they cannot be shared and its rows stay.
    entries : DeviceArray of int64, shape (blocks, ENTRIES)
        Entries of shared blocks, row after row, with ascending neurons:
        ``value << 48 | neuron << 32 | position in its part << 16 | place in the row``.
    starts : DeviceArray of int32, shape (128 blocks, parts + 1)
        Where, in its block's list, the entries of each row and part begin, and those of its last
        part end; nothing for further parts, and for blocks that do not share.
    items : DeviceArray of int64, shape (1 + blocks * parts,)
        How many parts there are, each of up to 256 neurons of a block, about as many in all parts
        of it; then for each, those that take longest first and those of a block side by side,
        ``block << 32 | is it the block's last << 31 | first position << 16 | part << 9 | neurons of
        it``.
    order : DeviceArray of int64, shape (1 + blocks,)
        How many blocks there are; then for each, those of most neurons first, as in ``items``,
        ``block << 32 | neurons``.
    """

    room: int
    tokens: DeviceArray
    neurons: DeviceArray
    counts: DeviceArray
    entries: DeviceArray
    starts: DeviceArray
    items: DeviceArray
    order: DeviceArray

    @property
    def parts(self) -> int:
        """Parts of up to 256 neurons that a block can have."""
        return self.room // NEURONS


def list_shared_neurons(
    packed: DeviceActivations, order: DeviceArray, room: int, *, moves: bool = True
) -> SharedNeurons:
    """List the neurons of each block of tokens, and the rows of the tail; nothing waits.

    Unless ``moves`` is false, rows of blocks that have too many of them to share, or too many
    entries, become rows of the tail and have no entries left.

    Parameters
    ----------
    packed : DeviceActivations
        Of up to 32768 neurons, as many slots a row, and 512 a tile.
    order : DeviceArray of int32, shape (M,)
        All tokens, those of a block side by side.
    room : int
        Neurons that a block can have, a multiple of 256; blocks with more do not share.
    """
    (rows, neurons), stream = packed.shape, packed.values.stream
    blocks, parts = -(-rows // TOKENS), room // NEURONS
    overflows = packed.overflows
    assert overflows is not None, "no activations of few tokens"
    shared = SharedNeurons(
        room,
        order,
        empty((blocks, room), np.int32, stream),
        empty(blocks, np.int32, stream),
        empty((blocks, ENTRIES), np.int64, stream),
        empty((blocks * TOKENS, parts + 1), np.int32, stream),
        empty(1 + blocks * parts, np.int64, stream),
        empty(1 + blocks, np.int64, stream),
    )
    list_union(
        blocks, packed.values, packed.columns, packed.counts, order, shared.neurons, shared.counts,
        shared.entries, shared.starts, overflows, rows, packed.tile, packed.tiles, packed.slots,
        room, -(-neurons // 32), int(moves),
    )  # fmt: skip
    finish_lists(
        -(-8 * blocks // THREADS) + 1, shared.counts, shared.starts, shared.items, shared.order,
        blocks, parts + 1, overflows, packed.tail_rows, packed.tail_count, overflows.size,
    )  # fmt: skip
    return shared


@device_function
def list_neuron(listed, bits, at, row, neuron, slot, is_there):
    """Note that a neuron fires, and an entry of it, in shared memory."""
    if is_there:
        listed[at] = types.int32(row << ROW_SHIFT | neuron << SLOT_BITS | slot)
        set_shared_bit(bits, neuron >> 5, neuron & 31)


@device_function
def list_cell(listed, bits, columns, start, row, neuron, count, at):
    """Note all entries of a tile of a row; its columns begin at ``start``."""
    slot = types.int32(0)
    while slot < count:
        first, last = start + slot, start + types.int32(count - 1)
        a = types.int32(load(columns, first))
        b = types.int32(load(columns, min(first + 1, last)))
        c = types.int32(load(columns, min(first + 2, last)))
        d = types.int32(load(columns, min(first + 3, last)))
        n = types.int32(count - slot)
        here = types.int32(at + slot)
        list_neuron(listed, bits, here, row, types.int32(neuron + a), slot, True)
        if n > 1:
            list_neuron(
                listed, bits, types.int32(here + 1), row, types.int32(neuron + b),
                types.int32(slot + 1), True,
            )  # fmt: skip
            list_neuron(
                listed, bits, types.int32(here + 2), row, types.int32(neuron + c),
                types.int32(slot + 2), n > 2,
            )  # fmt: skip
            list_neuron(
                listed, bits, types.int32(here + 3), row, types.int32(neuron + d),
                types.int32(slot + 3), n > 3,
            )  # fmt: skip
        slot = types.int32(slot + 4)


@device_function
def neuron_of(code):
    """Return the neuron of an entry in shared memory."""
    return types.int32(code >> SLOT_BITS & (MOST_NEURONS - 1))


@device_function
def position_of(bits, before, neuron):
    """Return where a neuron that fires is in the block's list."""
    word = types.int32(neuron >> 5)
    below = types.int32((types.int32(1) << (neuron & 31)) - 1)
    return types.int32(before[word] + count_bits(bits[word] & below))


@device_function
def count_of_cell(counts, tokens, cell, last, tiles):
    """Return how many entries a cell of a block has; 0 past the last."""
    inside = min(cell, last)
    row = types.int32(inside // tiles)
    at = types.int64(tokens[row]) * tiles + types.int32(inside - row * tiles)
    count = load(counts, at)
    return count if cell <= last else types.int32(0)


@device_function
def sum_of_counts(counts, tokens, first, n, tiles):
    """Return how many entries ``n`` cells of a block have."""
    total = types.int32(0)
    last = types.int32(first + n - 1)
    i = types.int32(0)
    while i < n:
        cell = types.int32(first + i)
        a = count_of_cell(counts, tokens, cell, last, tiles)
        b = count_of_cell(counts, tokens, types.int32(cell + 1), last, tiles)
        c = count_of_cell(counts, tokens, types.int32(cell + 2), last, tiles)
        d = count_of_cell(counts, tokens, types.int32(cell + 3), last, tiles)
        total = types.int32(total + a + b + c + d)
        i = types.int32(i + 4)
    return total


@device_function
def parts_of(count):
    """Return in how many parts a block's neurons are multiplied."""
    return types.int32((count + NEURONS - 1) // NEURONS)


@device_function
def size_of_parts(count):
    """Return how many of a block's neurons each part has, but for the last: a multiple of 16."""
    parts = max(types.int32(1), parts_of(count))
    return types.int32(((count + parts - 1) // parts + 15) // 16 * 16)


@device_function
def move_to_tail(counts, overflows, tokens, rows, tiles):
    """Mark the rows of a block as rows of the tail, which have no entries."""
    cuda.syncthreads()  # other threads may still read counts
    cell = types.int32(cuda.threadIdx.x)
    while cell < rows * tiles:
        row = types.int32(cell // tiles)
        token = types.int64(tokens[row])
        in_row = types.int32(cell - row * tiles)
        store(counts, token * tiles + in_row, 0)
        if in_row == 0:
            set_bit(overflows, token // 32, token % 32)
        cell = types.int32(cell + cuda.blockDim.x)


@device_function
def quotient(value, inverse):
    """Return value / n rounded down, of integers below 2^15, with 1 / n as float32."""
    return types.int32((types.float32(value) + types.float32(0.5)) * inverse)


@device_function
def first_from(listed, bits, before, entry, end, position):
    """Return the first of a row's entries whose neuron has this position or a later one."""
    while entry < end:
        middle = types.int32((entry + end) // 2)
        if position_of(bits, before, neuron_of(listed[middle])) < position:
            entry = types.int32(middle + 1)
        else:
            end = middle
    return entry


@kernel(threads=THREADS, shared_memory=4 * ENTRIES)
def list_union(
    values, columns, counts, order, neurons, union_counts, entries, starts, overflows, rows, tile,
    tiles, slots, room, words, moves,
):  # fmt: skip
    """List the neurons that fire for a block of tokens, and its entries."""
    # entries: the row in the block, the neuron, and which of its tile's it is
    listed = cuda.shared.array(0, types.int32)
    bits = cuda.shared.array(MOST_WORDS, types.int32)
    before = cuda.shared.array(MOST_WORDS, types.int32)
    parts = cuda.shared.array(66, types.int32)
    tokens = cuda.shared.array(TOKENS, types.int32)
    row_starts = cuda.shared.array(ROW_STARTS, types.int32)
    thread = types.int32(cuda.threadIdx.x)
    threads = types.int32(cuda.blockDim.x)
    block = types.int64(cuda.blockIdx.x)
    words = types.int32(words)
    w = thread
    while w < words:
        bits[w] = 0
        w = types.int32(w + threads)
    if thread < TOKENS:
        tokens[thread] = load(order, min(block * TOKENS + thread, rows - 1))
    cuda.syncthreads()

    # a thread has cells side by side, so that one sum says where its entries go
    in_row = types.int32(tiles)
    cells = types.int32(min(types.int64(TOKENS), rows - block * TOKENS) * tiles)
    most = types.int32((cells + threads - 1) // threads)
    cell = types.int32(min(thread * most, cells))
    end = types.int32(min(cell + most, cells))
    own = sum_of_counts(counts, tokens, cell, types.int32(end - cell), in_row)
    at, total = prefix_of_block(own, parts)
    if thread <= TOKENS:
        row_starts[thread] = total  # of rows past the last
    cuda.syncthreads()
    fits = total <= ENTRIES
    row = types.int32(cell // in_row)
    t = types.int32(cell - row * in_row)
    while fits and cell < end:
        at_cell = types.int64(tokens[row]) * tiles + t
        count = load(counts, at_cell)
        if t == 0:
            row_starts[row] = at
        list_cell(
            listed, bits, columns, at_cell * slots,
            row, types.int32(t * tile), count, at,
        )  # fmt: skip
        at = types.int32(at + count)
        cell = types.int32(cell + 1)
        t = types.int32(t + 1)
        if t == in_row:
            t = types.int32(0)
            row = types.int32(row + 1)
    cuda.syncthreads()

    union = types.int32(0)
    start = types.int32(0)
    while start < words:
        w = types.int32(start + thread)
        in_word = types.int32(0)
        if w < words:
            in_word = types.int32(count_bits(bits[w]))
        earlier, in_all = prefix_of_block(in_word, parts)
        if w < words:
            before[w] = types.int32(union + earlier)
        union = types.int32(union + in_all)
        start = types.int32(start + threads)
    cuda.syncthreads()
    shares = fits and union <= room
    if not shares and moves != 0:
        move_to_tail(counts, overflows, tokens, types.int32(cells // in_row), in_row)
        total, union, shares = types.int32(0), types.int32(0), True
    if not shares:
        union = types.int32(0)
    elif total == 0:  # y of such rows is written, too: as if one neuron fired for none
        union = types.int32(1)
        if thread == 0:
            store(neurons, block * room, 0)
    if thread == 0:
        store(union_counts, block, union)
    if union == 0:
        return

    w = thread
    while total > 0 and w < words:
        place = block * room + before[w]
        left = bits[w]
        while left != 0:
            lowest = types.int32(left & -left)
            store(neurons, place, types.int32(w * 32 + count_bits(types.int32(lowest - 1))))
            left = types.int32(left ^ lowest)
            place += 1
        w = types.int32(w + threads)

    size = size_of_parts(union)
    columns_of_starts = types.int32(parts_of(union) + 1)
    k = thread
    while k < TOKENS * columns_of_starts:
        row = types.int32(k // columns_of_starts)
        part = types.int32(k - row * columns_of_starts)
        first, last = row_starts[row], row_starts[row + 1]
        if total == 0:
            first, last = types.int32(0), types.int32(0)
        at = first_from(listed, bits, before, first, last, types.int32(part * size))
        store(starts, (block * TOKENS + row) * types.int32(room // NEURONS + 1) + part, at)
        k = types.int32(k + threads)

    row_slots = tiles * slots
    in_cell = types.int32(slots)
    of_tile, of_part = types.float32(1.0 / tile), types.float32(1.0 / size)
    ahead = cuda.local.array(AHEAD, types.int64)
    places = cuda.local.array(AHEAD, types.int32)
    first = thread
    while first < total:
        for i in range(AHEAD):
            e = types.int32(first + i * threads)
            if e < total:
                code = listed[e]
                cell = types.int32(quotient(neuron_of(code), of_tile) * in_cell)
                place = types.int32(cell + (code & (MOST_SLOTS - 1)))
                token = types.int64(tokens[code >> ROW_SHIFT])
                ahead[i] = half_bits(values, token * row_slots + place)
                places[i] = place
        for i in range(AHEAD):
            e = types.int32(first + i * threads)
            if e < total:
                neuron = neuron_of(listed[e])
                position = position_of(bits, before, neuron)
                in_part = types.int32(position - quotient(position, of_part) * size)
                high = types.int64(neuron) | ahead[i] << 16
                low = types.int64(types.int32(in_part << 16) | places[i])
                store(entries, block * ENTRIES + e, high << 32 | low)
        first = types.int32(first + AHEAD * threads)


@device_function
def code_of_cost(counts, starts, block, columns_of_starts):
    """Return how long a part of a block takes and, in the low 8 bits, how many parts it has."""
    count = load(counts, block)
    n = parts_of(count)
    if n == 0:
        return types.int32(0)
    last_row = types.int64(block) * TOKENS + (TOKENS - 1)
    entries = types.int32(load(starts, last_row * columns_of_starts + n))
    cost = types.int32(size_of_parts(count) + types.int32(entries // n) // ENTRIES_OF_COST)
    return types.int32(cost << 8 | n)


@device_function
def order_blocks(counts, starts, items, order, blocks, columns_of_starts):
    """Put blocks in order, and parts of up to 256 of their neurons; eight threads take a block."""
    known = cuda.shared.array(THREADS, types.int32)
    known_codes = cuda.shared.array(THREADS, types.int32)
    parts = cuda.shared.array(66, types.int32)
    thread = types.int32(cuda.threadIdx.x)
    threads = types.int32(cuda.blockDim.x)
    blocks = types.int32(blocks)
    own = types.int32(thread % 8)
    b = types.int32(cuda.blockIdx.x * (threads // 8) + thread // 8)
    count = types.int32(0)
    code = types.int32(0)
    if b < blocks:
        count = load(counts, b)
        code = code_of_cost(counts, starts, b, columns_of_starts)
    cost = types.int32(code >> 8)
    place = types.int32(0)
    item = types.int32(0)
    shared = types.int32(0)
    items_there = types.int32(0)
    start = types.int32(0)
    while start < blocks:
        other = types.int32(start + thread)
        known[thread] = types.int32(0)
        known_codes[thread] = types.int32(0)
        if other < blocks:
            known[thread] = load(counts, other)
            known_codes[thread] = code_of_cost(counts, starts, other, columns_of_starts)
        _, more = prefix_of_block(types.int32(1 if known[thread] > 0 else 0), parts)
        shared = types.int32(shared + more)
        _, more = prefix_of_block(types.int32(known_codes[thread] & 0xFF), parts)
        items_there = types.int32(items_there + more)
        # others come before it if they have more, or as many and a lower number
        c = own
        end = min(threads, types.int32(blocks - start))
        ahead = types.int32(b - start)
        while c < end:
            earlier = types.int32(1 if c < ahead else 0)
            other_code = known_codes[c]
            if known[c] + earlier > count:
                place = types.int32(place + 1)
            if types.int32(other_code >> 8) + earlier > cost:
                item = types.int32(item + (other_code & 0xFF))
            c = types.int32(c + 8)
        cuda.syncthreads()
        start = types.int32(start + threads)
    for step in range(3):
        place = types.int32(place + cuda.shfl_xor_sync(FULL_WARP, place, 4 >> step))
        item = types.int32(item + cuda.shfl_xor_sync(FULL_WARP, item, 4 >> step))
    if own == 0 and count > 0:
        store(order, 1 + place, types.int64(b) << 32 | types.int64(count))
    n, size = types.int32(code & 0xFF), size_of_parts(count)
    for t in range(own, n, 8):
        low = types.int64(t * size)
        here = min(types.int64(size), count - low)
        is_last = types.int64(1 if t == n - 1 else 0)
        word = types.int64(b) << 32 | is_last << 31 | low << 16 | types.int64(t) << 9 | here
        store(items, 1 + item + t, word)
    if cuda.blockIdx.x == 0 and thread == 0:
        store(items, 0, items_there)
        store(order, 0, shared)


@kernel(threads=THREADS)
def finish_lists(
    counts, starts, items, order, blocks, columns_of_starts, overflows, tail_rows, tail_count, words
):  # fmt: skip
    """Put blocks and parts in order; the last block of threads lists the rows of the tail."""
    if cuda.blockIdx.x + 1 < cuda.gridDim.x:
        order_blocks(counts, starts, items, order, blocks, columns_of_starts)
    else:
        list_marked_rows(overflows, tail_rows, tail_count, words)
