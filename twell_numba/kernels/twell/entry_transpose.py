"""The packed entries of a batch listed by neuron, on a GPU: a counting sort.

    entries of neuron j:  rows[e], coefficients[e]  for neuron_starts[j] <= e < neuron_starts[j + 1]

Rows ascend in each neuron's list, whatever the order in a row: the same lists in every run. Rows
are cut into chunks and neurons into ranges. For each of both a block keeps a bit in shared memory
for every neuron and row; how many are set below an entry's own is its place among the chunk's, and
before it come the entries of earlier chunks and of neurons before. The bits are made twice, so that
only counts go to memory.

Lists are cut into parts, to be worked on side by side: a few neurons can have most of the entries.

    parts of neuron j:  parts part_starts[j] to part_starts[j + 1], at least one each

Bound by the latency of few dependent steps. So a thread, which takes a tile of a row, asks for the
columns of four entries at a time, and then for what it needs of their neurons. On an H200, M 16384,
F 5632, 29 entries a row of neurons alike, in us:

| | count | chunks | number | place | in all |
| --- | --- | --- | --- | --- | --- |
| masks of all neurons in memory, set by a thread a tile | | | | | 93 |
| 128 chunks of all neurons in shared memory, an entry at a time | 12 | 9 | 25 | 35 | 90 |
| as here: 64 chunks by four ranges of neurons, four entries at a time | 15 | 11 | 21 | 38 | 88 |
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numpy.typing import DTypeLike

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import cuda, device_function, intrinsic, load, store, types
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import bits_below, block_prefix, count_bits

_i32 = ir.IntType(32)

CHUNK_THREADS = 512
LIST_THREADS = 1024
CHUNKS = 64  # at least, where words of 32 rows can be so few
MOST_WORDS = 8  # of 32 rows, for each neuron of a chunk
SHARED_WORDS = 12 * 1024  # as much as a block gets without asking for more
FEWEST_ENTRIES = 128  # of a part that is not its neuron's last; a power of two
MOST_PARTS = 2048  # besides one for each neuron
MOST_SLOTS = 2**31 - 1  # they are numbered in 32 bits


def _set_shared_bit(typing_context, words, index, bit):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        shift = context.cast(builder, arguments[2], signature.args[2], types.int32)
        word = builder.shl(ir.Constant(_i32, 1), shift)
        builder.atomic_rmw("or", builder.gep(data, [position]), word, "monotonic")
        return context.get_dummy_value()

    return types.void(words, index, bit), generate


def _set_shared_bit_alone(words, index, bit, definition=_set_shared_bit):
    """What set_shared_bit does; see below."""
    word = (int(words[index]) & 0xFFFFFFFF) | (1 << int(bit))
    words[index] = word - (1 << 32) if word >= 1 << 31 else word


# set_shared_bit(words, index, bit) sets a bit of an array of int32 in shared memory, whoever else
# does. The plain function is what tests without a GPU run.
set_shared_bit = intrinsic(_set_shared_bit)
set_shared_bit.py_func = _set_shared_bit_alone


@dataclass
class NeuronLists:
    """The entries of a batch, by neuron.

    Attributes
    ----------
    neuron_starts : DeviceArray of int32, shape (F + 1,)
    chunk : int
        How many rows a chunk has, but for the last.
    earlier_counts : DeviceArray of int32, shape (chunks, F)
        How many of a neuron's entries are in chunks before one.
    part_starts : DeviceArray of int32, shape (F + 2,)
        Of each neuron's parts of its list, and of how many entries a part has at most.
    part_neurons : DeviceArray of int32, shape (F + MOST_PARTS,)
        Each part's neuron, or -1 of one that is left out; as many as there are parts.
    split_neurons : DeviceArray of int32, shape (1 + MOST_PARTS,)
        How many neurons have several parts, then these neurons, ascending.
    rows : DeviceArray of uint16 or int32, shape (M * tiles * slots,)
        As many as ``neuron_starts`` says.
    coefficients : tuple of DeviceArray, shape (M * tiles * slots,) each
        Room for what a pass computes of each entry, in the activations' dtype: h, dg and du, or h
        and dh for a layer without a gate.
    """

    neuron_starts: DeviceArray
    chunk: int
    earlier_counts: DeviceArray
    part_starts: DeviceArray
    part_neurons: DeviceArray
    split_neurons: DeviceArray
    rows: DeviceArray
    coefficients: tuple[DeviceArray, ...]


def list_by_neuron(
    packed: DeviceActivations, left_out: DeviceArray | None = None
) -> tuple[NeuronLists, DeviceArray]:
    """List packed entries by neuron, before their coefficients are known; nothing waits.

    Parameters
    ----------
    packed : DeviceActivations
    left_out : DeviceArray of int32, shape (F,), optional
        1 for each neuron whose list is not to be worked on by parts, otherwise 0.

    Returns
    -------
    lists : NeuronLists
    entry_places : DeviceArray of int32, shape (M, tiles * slots)
        Where in the lists each entry is.

    Raises
    ------
    ValueError
        If there are so many slots that 32 bits do not number them.
    """
    if packed.values.size > MOST_SLOTS:
        raise ValueError(
            f"activations with {packed.values.size} slots given, at most {MOST_SLOTS} wanted by "
            "the backward pass: fewer rows or fewer slots a tile"
        )
    (rows, neurons), stream = packed.shape, packed.values.stream
    words, width = words_of_chunk(rows), range_of_block(rows, neurons)
    chunks, ranges = -(-rows // (32 * words)), -(-neurons // max(1, width))
    lists = _room_for_lists(packed, 32 * words)
    entry_places = empty(packed.values.shape, np.int32, stream)
    chunk_counts = lists.earlier_counts  # first of each chunk itself
    neuron_counts = empty(neurons, np.int32, stream)
    pattern = (packed.columns, packed.counts)
    layout = (rows, neurons, words, width, packed.tile, packed.tiles, packed.slots)
    count_entries(chunks * ranges, *pattern, chunk_counts, *layout)
    add_chunks(-(-neurons // 32), chunk_counts, neuron_counts, neurons, chunks)
    number_parts(
        number_parts.blocks(neurons), neuron_counts, lists.neuron_starts, lists.part_starts,
        lists.part_neurons, lists.split_neurons, neuron_counts if left_out is None else left_out,
        neurons, FEWEST_ENTRIES, MOST_PARTS, int(left_out is not None),
    )  # fmt: skip
    place_entries(
        chunks * ranges, *pattern, chunk_counts, lists.neuron_starts, lists.rows, entry_places,
        *layout,
    )  # fmt: skip
    return lists, entry_places


def words_of_chunk(rows: int) -> int:
    """Return of how many times 32 rows a chunk is."""
    return max(1, min(MOST_WORDS, rows // (32 * CHUNKS)))


def range_of_block(rows: int, neurons: int) -> int:
    """Return for how many neurons a block keeps bits: no more than it has room for, all alike."""
    most = SHARED_WORDS // words_of_chunk(rows)
    return -(-neurons // max(1, -(-neurons // most)))


def index_dtype(limit: int) -> DTypeLike:
    """Return the dtype of indices below ``limit``."""
    return np.uint16 if limit <= 65536 else np.int32


def _room_for_lists(packed: DeviceActivations, chunk: int) -> NeuronLists:
    (rows, neurons), stream, size = packed.shape, packed.values.stream, packed.values.size
    dtypes = [packed.values.dtype] * (3 if packed.gated else 2)
    return NeuronLists(
        neuron_starts=empty(neurons + 1, np.int32, stream),
        chunk=chunk,
        earlier_counts=empty((-(-rows // chunk), neurons), np.int32, stream),
        part_starts=empty(neurons + 2, np.int32, stream),
        part_neurons=empty(neurons + MOST_PARTS, np.int32, stream),
        split_neurons=empty(1 + MOST_PARTS, np.int32, stream),
        rows=empty(size, index_dtype(rows), stream),
        coefficients=tuple(empty(size, dtype, stream) for dtype in dtypes),
    )


@device_function
def mark_column(masks, neuron, here, words, bit):
    """Set the bit of an entry of a neuron, which counts from the range's first, if it is there."""
    if 0 <= neuron < here:
        set_shared_bit(masks, neuron * words + bit // 32, bit % 32)


@device_function
def mark_entries(
    masks, columns, counts, first_row, rows, words, first_neuron, here, tile, tiles, slots
):  # fmt: skip
    """Clear the bits, then set those of a chunk's entries; for a block."""
    i = types.int32(cuda.threadIdx.x)
    while i < here * words:
        masks[i] = 0
        i = types.int32(i + cuda.blockDim.x)
    cuda.syncthreads()
    first_tile = types.int32(first_neuron // tile)
    width = types.int32((first_neuron + here - 1) // tile - first_tile + 1)  # in tiles
    items = types.int32(min(rows - first_row, 32 * words) * width)
    item = types.int32(cuda.threadIdx.x)
    while item < items:
        bit = types.int32(item // width)
        t = types.int32(first_tile + (item - bit * width))
        offset = types.int32(t * tile - first_neuron)
        at = (first_row + bit) * tiles + t
        count = types.int32(load(counts, at))
        slot = types.int32(0)
        while slot < count:
            # past the last entry it is taken again, which changes nothing
            last = at * slots + (count - 1)
            start = at * slots + slot
            a = offset + types.int32(load(columns, start))
            b = offset + types.int32(load(columns, min(start + 1, last)))
            c = offset + types.int32(load(columns, min(start + 2, last)))
            d = offset + types.int32(load(columns, min(start + 3, last)))
            mark_column(masks, a, here, words, bit)
            mark_column(masks, b, here, words, bit)
            mark_column(masks, c, here, words, bit)
            mark_column(masks, d, here, words, bit)
            slot = types.int32(slot + 4)
        item = types.int32(item + cuda.blockDim.x)
    cuda.syncthreads()  # all bits are set


@kernel(threads=CHUNK_THREADS, shared_memory=4 * SHARED_WORDS, blocks_per_multiprocessor=2)
def count_entries(
    columns, counts, chunk_counts, rows, neurons, words, width, tile, tiles, slots
):  # fmt: skip
    """Count the entries of a chunk for each neuron of a range of ``width``; a block each."""
    masks = cuda.shared.array(0, types.int32)
    ranges = types.int32((neurons + width - 1) // width)
    chunk = types.int64(cuda.blockIdx.x // ranges)
    first_neuron = types.int64(cuda.blockIdx.x % ranges) * width
    here = min(width, neurons - first_neuron)
    mark_entries(
        masks, columns, counts, chunk * 32 * words, rows, words, first_neuron, here, tile, tiles,
        slots,
    )  # fmt: skip
    neuron = types.int64(cuda.threadIdx.x)
    while neuron < here:
        count = types.int32(0)
        for w in range(words):
            count = types.int32(count + count_bits(masks[neuron * words + w]))
        store(chunk_counts, chunk * neurons + first_neuron + neuron, count)
        neuron += cuda.blockDim.x


@device_function
def place_of(masks, places, neuron_starts, start, first_neuron, neuron, here, words, bit):
    """Return where in the lists an entry is, whose neuron counts from the range's first.

    ``start`` is where the chunk's row of ``places`` begins. Beyond the range it is any number.
    """
    neuron = max(types.int32(0), min(neuron, types.int32(here - 1)))
    place = types.int32(load(neuron_starts, first_neuron + neuron))
    place = types.int32(place + load(places, start + first_neuron + neuron))
    word = neuron * types.int32(words)
    for w in range(bit // 32):
        place = types.int32(place + count_bits(masks[word + w]))
    return types.int32(place + count_bits(masks[word + bit // 32] & bits_below(bit % 32)))


@device_function
def store_place(list_rows, entry_places, row, at, place, is_there):
    """Write an entry to the lists."""
    if is_there:
        store(list_rows, place, row)
        store(entry_places, at, place)


@kernel(threads=CHUNK_THREADS, shared_memory=4 * SHARED_WORDS, blocks_per_multiprocessor=2)
def place_entries(
    columns, counts, places, neuron_starts, list_rows, entry_places, rows, neurons, words, width,
    tile, tiles, slots,
):  # fmt: skip
    """Write a chunk's entries of a range of neurons to the lists; a block each."""
    masks = cuda.shared.array(0, types.int32)
    ranges = types.int32((neurons + width - 1) // width)
    chunk = types.int64(cuda.blockIdx.x // ranges)
    first_row = chunk * 32 * words
    first_neuron = types.int64(cuda.blockIdx.x % ranges) * width
    here = types.int32(min(width, neurons - first_neuron))
    mark_entries(
        masks, columns, counts, first_row, rows, words, first_neuron, here, tile, tiles, slots
    )
    first_tile = types.int32(first_neuron // tile)
    tiles_here = types.int32((first_neuron + here - 1) // tile - first_tile + 1)
    items = types.int32(min(rows - first_row, 32 * words) * tiles_here)
    item = types.int32(cuda.threadIdx.x)
    while item < items:
        bit = types.int32(item // tiles_here)
        t = types.int32(first_tile + (item - bit * tiles_here))
        offset = types.int32(t * tile - first_neuron)
        row = types.int32(first_row + bit)
        at = row * tiles + t
        count = types.int32(load(counts, at))
        slot = types.int32(0)
        while slot < count:
            start = types.int32(at * slots + slot)
            last = types.int32(start - slot + (count - 1))
            a = types.int32(offset + types.int32(load(columns, start)))
            b = types.int32(offset + types.int32(load(columns, min(start + 1, last))))
            c = types.int32(offset + types.int32(load(columns, min(start + 2, last))))
            d = types.int32(offset + types.int32(load(columns, min(start + 3, last))))
            place_a = place_of(
                masks, places, neuron_starts, chunk * neurons, first_neuron, a, here, words, bit
            )
            place_b = place_of(
                masks, places, neuron_starts, chunk * neurons, first_neuron, b, here, words, bit
            )
            place_c = place_of(
                masks, places, neuron_starts, chunk * neurons, first_neuron, c, here, words, bit
            )
            place_d = place_of(
                masks, places, neuron_starts, chunk * neurons, first_neuron, d, here, words, bit
            )
            is_there = 0 <= a < here
            store_place(list_rows, entry_places, row, start, place_a, is_there)
            is_there = start + 1 <= last and 0 <= b < here
            store_place(list_rows, entry_places, row, start + 1, place_b, is_there)
            is_there = start + 2 <= last and 0 <= c < here
            store_place(list_rows, entry_places, row, start + 2, place_c, is_there)
            is_there = start + 3 <= last and 0 <= d < here
            store_place(list_rows, entry_places, row, start + 3, place_d, is_there)
            slot = types.int32(slot + 4)
        item = types.int32(item + cuda.blockDim.x)


@kernel(threads=LIST_THREADS)
def add_chunks(counts, neuron_counts, neurons, chunks):
    """Replace counts (chunks, F) by sums over earlier chunks, and write each neuron's count.

    A block takes 32 neurons, a warp of it a share of the chunks.
    """
    parts = cuda.shared.array(LIST_THREADS, types.int32)
    warps = cuda.blockDim.x // 32
    warp = cuda.threadIdx.x // 32
    lane = cuda.threadIdx.x % 32
    neuron = types.int64(cuda.blockIdx.x) * 32 + lane
    share = (chunks + warps - 1) // warps
    first = warp * share
    stop = min(chunks, first + share)
    count = types.int32(0)
    if neuron < neurons:
        for chunk in range(first, stop):
            count = types.int32(count + load(counts, chunk * neurons + neuron))
    parts[cuda.threadIdx.x] = count
    cuda.syncthreads()
    if neuron < neurons:
        total = types.int32(0)
        for i in range(warp):
            total = types.int32(total + parts[i * 32 + lane])
        for chunk in range(first, stop):
            count = types.int32(load(counts, chunk * neurons + neuron))
            store(counts, chunk * neurons + neuron, total)
            total = types.int32(total + count)
        if warp == warps - 1:
            store(neuron_counts, neuron, total)


@device_function
def is_left_out(left_out, leaves_out, neuron):
    """Return whether a neuron's list is not to be worked on by parts."""
    return leaves_out != 0 and load(left_out, neuron) != 0


@kernel(threads=LIST_THREADS)
def number_parts(
    neuron_counts, neuron_starts, part_starts, part_neurons, split_neurons, left_out, neurons,
    fewest_entries, most_parts, leaves_out,
):  # fmt: skip
    """Write where each neuron's list begins, and number the parts; a thread takes a neuron.

    A block adds up for itself what comes before. The last of ``part_starts`` (F + 2,) is how many
    entries a part has at most: a power of two. A neuron that is left out has one part, which is
    nobody's. Without ``leaves_out`` no neuron is.
    """
    first = types.int64(cuda.blockIdx.x) * cuda.blockDim.x
    neuron = first + cuda.threadIdx.x
    # two sums in one number: of all neurons, and of those of earlier blocks
    both = types.int64(0)
    i = types.int64(cuda.threadIdx.x)
    while i < neurons:
        count = types.int64(load(neuron_counts, i))
        both += count << 32
        if i < first:
            both += count
        i += cuda.blockDim.x
    _, both = block_prefix(both)
    total = types.int32(both >> 32)
    size = types.int64(fewest_entries)
    shift = types.int32(count_bits(fewest_entries - 1))
    while size * most_parts < total:
        size *= 2
        shift = types.int32(shift + 1)
    # and of parts, and of neurons with several parts
    parts = types.int64(0)
    i = types.int64(cuda.threadIdx.x)
    while i < first:
        count = types.int64(load(neuron_counts, i))
        if is_left_out(left_out, leaves_out, i):
            count = types.int64(0)
        parts += max(types.int64(1), (count + size - 1) >> shift)
        if count > size:
            parts += types.int64(1) << 32
        i += cuda.blockDim.x
    _, parts = block_prefix(parts)
    own = types.int64(0)
    own_parts = types.int64(0)
    is_split = False
    whose = neuron
    if neuron < neurons:
        own = types.int64(load(neuron_counts, neuron))
        own_parts = max(types.int64(1), (own + size - 1) >> shift)
        is_split = own > size
        if is_left_out(left_out, leaves_out, neuron):
            own_parts = types.int64(1)
            is_split = False
            whose = types.int64(-1)
        if is_split:
            own_parts += types.int64(1) << 32
    before, _ = block_prefix(own)
    parts_before, _ = block_prefix(own_parts)
    if neuron < neurons:
        start = types.int32((both & 0xFFFFFFFF) + before)
        parts += parts_before
        part = types.int32(parts & 0xFFFFFFFF)
        last_part = types.int32((parts + own_parts) & 0xFFFFFFFF)
        split = types.int32(parts >> 32)
        store(neuron_starts, neuron, start)
        store(part_starts, neuron, part)
        for p in range(part, last_part):
            store(part_neurons, p, whose)
        if is_split:
            split = types.int32(split + 1)
            store(split_neurons, split, neuron)
        if neuron == neurons - 1:
            store(neuron_starts, neurons, total)
            store(part_starts, neurons, last_part)
            store(part_starts, neurons + 1, size)
            store(split_neurons, 0, split)
