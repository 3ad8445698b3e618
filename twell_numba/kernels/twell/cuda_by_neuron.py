"""The entries of packed activations listed by neuron, on a GPU: a counting sort.

Rows are cut into chunks of 32. A word for each chunk and neuron has a bit for each row of the chunk
in which the neuron fires. How many bits are set in the words of earlier chunks and below an entry's
own bit is its place in its neuron's list: the rows of each list ascend, in every run.

Lists are cut into parts, to be worked on side by side: a few neurons can have most of the entries.

    list of neuron j:   entries neuron_starts[j] to neuron_starts[j + 1]
    parts of neuron j:  parts part_starts[j] to part_starts[j + 1], at least one each

Bound by the latency of few dependent steps. On an H200, with 480000 entries of M = 16384 rows and
F = 5632 neurons, 0.093 ms; 0.092, 0.100, 0.129 and 0.194 with 1, 4, 8 and 16 threads a tile.
"""

from twell_numba.device.gpu import kernel
from twell_numba.device.gpu.language import (
    cuda,
    global_thread,
    grid_threads,
    load,
    store,
    types,
)
from twell_numba.kernels.twell.cuda_language import (
    bits_below,
    block_prefix,
    count_bits,
    set_bit,
)

CHUNK_ROWS = 32  # rows of a chunk: bits of a word
FEWEST_ENTRIES = 64  # of a part that is not its neuron's last
MOST_PARTS = 2048  # besides one for each neuron
TILE_THREADS = 2  # that share a tile's entries, a power of two
LIST_THREADS = 1024


@kernel()
def mark_entries(columns, counts, masks, rows, neurons, tile, tiles, slots):
    """Set the bits of all entries in ``masks`` (chunks, F), which is 0."""
    item = global_thread() // TILE_THREADS
    first_slot = global_thread() % TILE_THREADS
    while item < rows * tiles:
        count = load(counts, item)
        if first_slot < count:
            row = item // tiles
            first = row // CHUNK_ROWS * neurons + item % tiles * tile
            for slot in range(first_slot, count, TILE_THREADS):
                column = types.int64(load(columns, item * slots + slot))
                set_bit(masks, first + column, row % CHUNK_ROWS)
        item += grid_threads() // TILE_THREADS


@kernel(threads=LIST_THREADS)
def add_chunks(masks, places, neuron_starts, neurons, chunks):
    """Write to ``places`` (chunks, F) the sums over earlier chunks, and each neuron's count.

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
            count = types.int32(count + count_bits(load(masks, chunk * neurons + neuron)))
    parts[cuda.threadIdx.x] = count
    cuda.syncthreads()
    if neuron < neurons:
        total = types.int32(0)
        for i in range(warp):
            total = types.int32(total + parts[i * 32 + lane])
        for chunk in range(first, stop):
            store(places, chunk * neurons + neuron, total)
            total = types.int32(total + count_bits(load(masks, chunk * neurons + neuron)))
        if warp == warps - 1:
            store(neuron_starts, neuron, total)


@kernel(threads=LIST_THREADS)
def add_neurons(neuron_starts, part_starts, part_neurons, neurons, fewest_entries, most_parts):
    """Replace counts (F + 1,) by sums over the neurons before, and number the parts; for one block.

    The last of ``part_starts`` (F + 2,) is how many entries a part has at most.
    """
    share = (neurons + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = types.int64(cuda.threadIdx.x) * share
    stop = min(neurons, first + share)
    count = types.int64(0)
    for neuron in range(first, stop):
        count += load(neuron_starts, neuron)
    position, total = block_prefix(count)
    size = max(fewest_entries, (total + most_parts - 1) // most_parts)
    parts = types.int64(0)
    for neuron in range(first, stop):
        parts += max(1, (load(neuron_starts, neuron) + size - 1) // size)
    part, total_parts = block_prefix(parts)
    for neuron in range(first, stop):
        count = load(neuron_starts, neuron)
        store(neuron_starts, neuron, position)
        position += count
        store(part_starts, neuron, part)
        for _ in range(max(1, (count + size - 1) // size)):
            store(part_neurons, part, neuron)
            part += 1
    if cuda.threadIdx.x == 0:
        store(neuron_starts, neurons, total)
        store(part_starts, neurons, total_parts)
        store(part_starts, neurons + 1, size)


@kernel()
def list_entries(
    columns, counts, masks, places, neuron_starts, entry_rows, entry_slots,
    rows, neurons, tile, tiles, slots,
):  # fmt: skip
    """Write each entry's row, and its place in the row, to the lists."""
    item = global_thread() // TILE_THREADS
    first_slot = global_thread() % TILE_THREADS
    while item < rows * tiles:
        count = load(counts, item)
        if first_slot < count:
            row = item // tiles
            t = item % tiles
            below = bits_below(row % CHUNK_ROWS)
            for slot in range(first_slot, count, TILE_THREADS):
                neuron = t * tile + types.int64(load(columns, item * slots + slot))
                word = row // CHUNK_ROWS * neurons + neuron
                entry = types.int64(load(neuron_starts, neuron)) + load(places, word)
                entry += count_bits(load(masks, word) & below)
                store(entry_rows, entry, row)
                store(entry_slots, entry, t * slots + slot)
        item += grid_threads() // TILE_THREADS
