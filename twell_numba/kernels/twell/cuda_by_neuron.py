"""The entries of packed activations listed by neuron, on a GPU: a counting sort without atomics.

Rows are cut into chunks. A thread counts the entries of a chunk and a tile, whose counters are
nobody else's; sums over the chunks and over the neurons make places of the counts; the same thread
then puts its entries there. So the rows of each neuron ascend, in every run.
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
from twell_numba.kernels.twell.cuda_language import MOST_THREADS, block_prefix

# Rows of a chunk: at least, so that the counters stay few beside the entries, and at most so many
# chunks, over which one thread sums.
FEWEST_ROWS = 32
MOST_CHUNKS = 512


@kernel()
def count_entries(columns, counts, places, rows, neurons, tile, tiles, slots, chunk_rows):
    """Add to ``places`` (chunks, F), which is 0, the entries of each chunk by neuron."""
    item = global_thread()
    chunks = (rows + chunk_rows - 1) // chunk_rows
    while item < chunks * tiles:
        t = item % tiles
        first = item // tiles * neurons + t * tile
        start_row = item // tiles * chunk_rows
        for row in range(start_row, min(rows, start_row + chunk_rows)):
            start = (row * tiles + t) * slots
            for place in range(start, start + load(counts, row * tiles + t)):
                counter = first + types.int64(load(columns, place))
                store(places, counter, load(places, counter) + 1)
        item += grid_threads()


@kernel()
def add_chunks(places, neuron_starts, neurons, chunks):
    """Replace counts by sums over the chunks before; write each neuron's count.

    ``chunks`` is a multiple of 4: as many counts are asked for at once as can be without arrays.
    """
    neuron = global_thread()
    while neuron < neurons:
        total = types.int64(0)
        for chunk in range(0, chunks, 4):
            first = chunk * neurons + neuron
            count0 = load(places, first)
            count1 = load(places, first + neurons)
            count2 = load(places, first + 2 * neurons)
            count3 = load(places, first + 3 * neurons)
            store(places, first, total)
            total += count0
            store(places, first + neurons, total)
            total += count1
            store(places, first + 2 * neurons, total)
            total += count2
            store(places, first + 3 * neurons, total)
            total += count3
        store(neuron_starts, neuron, total)
        neuron += grid_threads()


@kernel(threads=MOST_THREADS)
def add_neurons(neuron_starts, neurons):
    """Replace counts (F + 1,) by sums over the neurons before; for one block."""
    share = (neurons + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = types.int64(cuda.threadIdx.x) * share
    count = types.int64(0)
    for neuron in range(first, min(neurons, first + share)):
        count += load(neuron_starts, neuron)
    position, total = block_prefix(count)
    for neuron in range(first, min(neurons, first + share)):
        count = load(neuron_starts, neuron)
        store(neuron_starts, neuron, position)
        position += count
    if cuda.threadIdx.x == 0:
        store(neuron_starts, neurons, total)


@kernel()
def list_entries(
    columns, counts, places, neuron_starts, entry_rows, entry_slots,
    rows, neurons, tile, tiles, slots, chunk_rows,
):  # fmt: skip
    """Write each entry's row, and its place in the row, to the lists."""
    item = global_thread()
    chunks = (rows + chunk_rows - 1) // chunk_rows
    while item < chunks * tiles:
        t = item % tiles
        chunk = item // tiles
        start_row = chunk * chunk_rows
        for row in range(start_row, min(rows, start_row + chunk_rows)):
            for slot in range(t * slots, t * slots + load(counts, row * tiles + t)):
                column = types.int64(load(columns, row * tiles * slots + slot))
                neuron = t * tile + column
                counter = chunk * neurons + neuron
                position = types.int64(load(places, counter))
                store(places, counter, position + 1)
                entry = types.int64(load(neuron_starts, neuron)) + position
                store(entry_rows, entry, row)
                store(entry_slots, entry, slot)
        item += grid_threads()
