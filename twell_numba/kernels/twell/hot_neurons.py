"""Weight gradients of neurons that fire for many tokens, as dense products on a GPU.

With the H *hot* neurons among the F, and their h, dg and du as matrices (H, M), zeros included:

    Wd'[hot] += h dy,    Wg'[hot] += dg x,    Wu'[hot] += du x          x, dy (M, D)

A kernel writes the matrices from lists of entries by neuron (:mod:`entry_transpose`), one below the
other; cuBLASLt multiplies them, dg and du at once, into float32; another kernel adds the rows to
the gradients. The gradients of all other neurons are gathered (:mod:`entry_gradients`). A gathered
entry costs a read of two rows from the second-level cache, a neuron's dense product 6 M D
operations whatever it fires for, so that dense is faster from about 2% of the tokens on. Which
neurons are hot is decided where tokens are learned to be told apart, and may be any: gradients are
right for every choice.

A token whose x or dy is not finite makes the gradients of all hot neurons NaN, not only of those
that fire for it, as the dense layer does for all neurons.

Bound by tensor cores, and with few hot neurons by reading x and dy. A block writes up to 2048
tokens of a neuron's three rows by way of shared memory, so that zeros and numbers leave together,
by 16 bytes; where their entries are listed is known for chunks of tokens. On an H200, M 16384,
D 2048, F 5632, gradients in float32, in ms:

| | H 256 | 512 | 1024 | 1280 |
| --- | --- | --- | --- | --- |
| writing, where entries begin found by halving | 0.025 | 0.050 | 0.091 | 0.116 |
| writing, numbers converted to float32 and back | 0.018 | 0.034 | 0.066 | 0.081 |
| the same, 1024 tokens by 128 threads; by 256; 2048 by 512 | | 0.033, 0.042, 0.043 | | |
| writing, as here: bits | 0.012 | 0.023 | 0.042 | |
| h dy | 0.033 | 0.047 | 0.078 | 0.097 |
| dg x and du x | 0.047 | 0.078 | 0.153 | 0.190 |
| adding | 0.004 | 0.007 | 0.017 | 0.024 |

448 hot neurons take as long to multiply as 512, 832 as long as 1024, 1088 nearly as long as 1280.
Matrices with a row for each token instead of each neuron take the same time to multiply. Writing is
at 2.2 TB/s, not bound by memory.
"""

import numpy as np

from twell_numba.device.gpu import DeviceArray, Stream, empty, from_numpy, kernel, view
from twell_numba.device.gpu.gemm import default_path, matmul
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    types,
)
from twell_numba.device.gpu.tensor_cores import store_four_words
from twell_numba.kernels.cuda_vectors import add_eight, load_aligned
from twell_numba.kernels.twell.cuda_activations import HotNeurons
from twell_numba.kernels.twell.entry_transpose import NeuronLists

# Of a neuron, that a block writes, at most.
TOKENS = 2048
# Tokens' words in shared memory: one is left out after every eight, so that eight of each of a
# warp's threads lie in different banks.
PITCH = TOKENS + TOKENS // 8
WORDS = 2 * PITCH
# Hot neurons come in multiples of this: 448 take as long as 512.
STEP = 256
# Neurons whose products are computed at a time, at most, so as not to need much memory.
MOST_AT_ONCE = 1536
# Room for them is in multiples of this, so that layers which differ in how many neurons are hot
# have buffers of a few sizes: a recording keeps buffers, and uses those of a size again.
ROOM = 512
# Fewer tokens do not repay the launches.
FEWEST_TOKENS = 4096
# Measured, in us, for D = 2048 and M = 16384, what follows them in proportion:
GATHERED = 0.9e-3  # a gathered entry, by D
WRITTEN = 0.043  # what a hot neuron takes to write, by M
MULTIPLIED = 0.225  # and to multiply, by both
READ = 25.0  # reading x and dy, whatever is hot, by both
LAUNCHED = 16.0  # launches, by neither


# ---- Which neurons are hot


def expected_microseconds(tokens_of: np.ndarray, hot: np.ndarray, rows: int, width: int) -> float:
    """Return how long the gradients of all neurons are expected to take.

    Parameters
    ----------
    tokens_of : ndarray of int, shape (F,)
        For how many of the ``rows`` tokens each neuron fires.
    hot : ndarray of int, shape (H,)
        The hot neurons.
    rows, width : int
        M and D.
    """
    gathered = int(tokens_of.sum(dtype=np.int64)) - int(tokens_of[hot].sum(dtype=np.int64))
    strips, tokens = width / 2048, rows / 16384
    expected = GATHERED * gathered * strips
    if hot.size:
        expected += (READ + MULTIPLIED * hot.size) * tokens * strips
        expected += WRITTEN * hot.size * tokens + LAUNCHED
    return expected


def choose_hot_neurons(tokens_of: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Return the neurons with which hot the gradients are expected to take least time.

    Parameters
    ----------
    tokens_of : ndarray of int, shape (F,)
        For how many of the ``rows`` tokens each neuron fires.
    rows, width : int
        M and D.

    Returns
    -------
    ndarray of int32, shape (H,)
        Ascending; H is a multiple of 256, and 0 where none are worth it.
    """
    sizes = range(0, tokens_of.size + 1, STEP)
    if default_path() != "cublas":  # the other product is far slower
        sizes = range(1)
    busiest = np.argsort(-tokens_of.astype(np.int64), kind="stable")
    best = min(sizes, key=lambda n: expected_microseconds(tokens_of, busiest[:n], rows, width))
    return np.sort(busiest[:best]).astype(np.int32)


def hold_hot_neurons(hot: np.ndarray, neurons: int, stream: Stream) -> HotNeurons | None:
    """Return hot neurons (H,) as kernels take them, of F ``neurons``; None for none."""
    if not hot.size:
        return None
    is_hot = np.zeros(neurons, np.int32)
    is_hot[hot] = 1
    return HotNeurons(from_numpy(hot, stream), from_numpy(is_hot, stream))


def fits(rows: int) -> bool:
    """Return whether products of so many tokens are fast: the matrices' rows have to be aligned."""
    return rows >= FEWEST_TOKENS and rows % 8 == 0


# ---- Gradients


def add_hot_gradients(
    dy: DeviceArray,
    x: DeviceArray,
    lists: NeuronLists,
    hot: HotNeurons,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> None:
    """Add to the hot neurons' gradients what their entries give; nothing waits for the GPU.

    For the time of the call, ``6 M + 12 D`` bytes are used for each hot neuron, of which there is
    room for 512, 1024 or 1536; more take turns.

    Parameters
    ----------
    dy, x : DeviceArray of bfloat16, shape (M, D)
        16-byte aligned; M and D multiples of 8.
    lists : NeuronLists
        Whose coefficients are h, dg and du of each entry.
    hot : HotNeurons
    gradients : tuple of DeviceArray, shape (F, D) each
        Those of Wd, Wg and Wu; changed in place.
    """
    count = hot.neurons.size
    turns = max(1, -(-count // MOST_AT_ONCE))
    step = -(-count // (turns * STEP)) * STEP
    for first in range(0, count, step):
        _add_some(dy, x, lists, hot.neurons[first : first + step], gradients)


def _add_some(
    dy: DeviceArray,
    x: DeviceArray,
    lists: NeuronLists,
    neurons: DeviceArray,
    gradients: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> None:
    count, (rows, width) = neurons.size, x.shape
    room = -(-count // ROOM) * ROOM
    matrices = empty((3 * room, rows), x.dtype, x.stream)[: 3 * count]
    chunks = TOKENS // lists.chunk  # of a block
    write_matrices(
        count * -(-rows // (chunks * lists.chunk)), neurons, lists.neuron_starts,
        lists.earlier_counts, lists.rows, *map(_bits, lists.coefficients), matrices, count, rows,
        gradients[0].shape[0], chunks, lists.chunk,
    )  # fmt: skip
    products = empty((3 * room, width), np.float32, x.stream)[: 3 * count]
    matmul(matrices[:count], dy, products[:count])
    matmul(matrices[count:], x, products[count:])
    items = products.size // 8
    add_products(add_products.blocks(items), neurons, products, *gradients, count, width)


def _bits(array: DeviceArray) -> DeviceArray:
    """Return a view of floats in 16 bits as the integers that their bits are."""
    return view(array, 0, array.shape, np.uint16)


@device_function
def entry_from(neuron_starts, earlier_counts, neuron, neurons, chunk, chunks):
    """Return where a neuron's entries of a chunk and later ones begin."""
    entry = types.int32(load(neuron_starts, neuron + (0 if chunk < chunks else 1)))
    if chunk < chunks:
        entry = types.int32(entry + load(earlier_counts, chunk * neurons + neuron))
    return entry


@device_function
def halves(words, start, shift):
    """Return a half of each of eight words of shared memory, 16 bits from ``shift`` on, as four."""
    return (
        half_of_two(words[start], words[start + 1], shift),
        half_of_two(words[start + 2], words[start + 3], shift),
        half_of_two(words[start + 4], words[start + 5], shift),
        half_of_two(words[start + 6], words[start + 7], shift),
    )


@device_function
def half_of_two(first, second, shift):
    """Return a word of one half of each of two words."""
    return types.int32(types.int32(first >> shift & 0xFFFF) | types.int32(second >> shift << 16))


@kernel()
def write_matrices(
    neurons, neuron_starts, earlier_counts, list_rows, hidden, d_pattern, d_up, matrices, count,
    rows, all_neurons, block_chunks, chunk_rows,
):  # fmt: skip
    """Write h, dg and du of hot neurons to ``matrices`` (3 count, M), zeros included.

    They are read as integers. In shared memory a token has a word of h and dg, and a word of du.
    """
    words = cuda.shared.array(WORDS, types.int32)
    chunks = types.int32((rows + chunk_rows - 1) // chunk_rows)
    blocks_a_row = types.int32((chunks + block_chunks - 1) // block_chunks)
    hot = types.int32(cuda.blockIdx.x // blocks_a_row)
    chunk = types.int32(cuda.blockIdx.x % blocks_a_row * block_chunks)
    first = types.int32(chunk * chunk_rows)
    here = types.int32(min(block_chunks * chunk_rows, rows - first))
    neuron = types.int64(load(neurons, hot))
    start = entry_from(neuron_starts, earlier_counts, neuron, all_neurons, chunk, chunks)
    end = entry_from(
        neuron_starts, earlier_counts, neuron, all_neurons, chunk + block_chunks, chunks
    )
    i = types.int32(cuda.threadIdx.x)
    while i < WORDS:
        words[i] = types.int32(0)
        i = types.int32(i + cuda.blockDim.x)
    cuda.syncthreads()  # all are 0
    entry = types.int32(start + cuda.threadIdx.x)
    while entry < end:
        token = types.int32(load(list_rows, entry) - first)
        place = types.int32(token + token // 8)
        h, dg = types.int32(load(hidden, entry)), types.int32(load(d_pattern, entry))
        words[place] = types.int32(h | types.int32(dg << 16))
        words[PITCH + place] = types.int32(load(d_up, entry))
        entry = types.int32(entry + cuda.blockDim.x)
    cuda.syncthreads()  # all are there
    token = types.int32(cuda.threadIdx.x * 8)
    while token < here:
        place = types.int32(token + token // 8)
        at = types.int64(hot) * rows + first + token
        pitch = types.int64(count) * rows
        store_four_words(matrices, at, halves(words, place, 0))
        store_four_words(matrices, at + pitch, halves(words, place, 16))
        store_four_words(matrices, at + 2 * pitch, halves(words, types.int32(PITCH + place), 0))
        token = types.int32(token + cuda.blockDim.x * 8)


@kernel()
def add_products(neurons, products, down_grad, pattern_grad, up_grad, count, width):
    """Add rows of ``products`` (3 count, D) to those of the gradients; eight numbers a thread."""
    eights = types.int32(width // 8)
    items = types.int64(count) * 3 * eights
    item = global_thread()
    while item < items:
        row = types.int32(item // eights)
        d = types.int32(item % eights * 8)
        matrix = types.int32(row // count)
        start = types.int64(load(neurons, row % count)) * width
        numbers = load_aligned(products, item * 8)
        if matrix == 0:
            add_eight(down_grad, start, d, width, numbers, 1)
        elif matrix == 1:
            add_eight(pattern_grad, start, d, width, numbers, 1)
        else:
            add_eight(up_grad, start, d, width, numbers, 1)
        item += grid_threads()
