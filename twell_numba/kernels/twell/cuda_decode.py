"""Activation-sparse layers for few tokens on a GPU, as when a model writes text: M up to 32.

    g = x Wg^T,  h = relu(g) * (x Wu^T),  y = h Wd        (two matrices: h = relu(x Wu^T))

with x, y (M, D) and weights (F, D). Of Wu and Wd only rows are read whose neuron fires for some
token. What is left is reading Wg once, at the speed of memory, in two kernels:

    1. relu(g), and at once u and h where a neuron fires
    2. y: a block takes 256 columns of a token, lists the neurons that fire in it, and its warps
       share them

Kernels for aligned rows of 16-bit numbers are in :mod:`aligned_decode`; those for all other dtypes,
widths and alignments are here: in the first of them a warp takes two neurons, and goes through
their rows.

Microseconds a layer on one H200 (D = 2048, F = 5632, bfloat16, 29 neurons firing a token; medians
of replayed graphs of 28 layers), weights from memory, and of one layer again and again, so that
they are in the second-level cache:

    M                        1     2     4     8    16    32
    dense                 27.1  27.3  27.3  27.5  28.0  29.6
    these, from memory    11.4  12.7  13.4  13.8  16.6  27.3
                          2.4x  2.1x  2.0x  2.0x  1.7x  1.1x
    these, from the cache  8.5   9.4  10.0  10.6  13.6  23.3

Of 29, 150, 560, 1400 neurons firing: M = 1 2.3x, 1.8x, 1.0x, 0.5x; M = 8 2.0x, 1.4x, 0.8x, 0.5x
(the first by :func:`hidden_of_token`). Other layers, 1 in 200 firing, M = 1, 8 and 32: D = 768,
F = 3072 2.4x, 2.1x, 1.2x; float32 2.4x, 2.4x, 0.5x; D = 2044 2.3x, 0.8x, 0.3x.

For one token the first kernel takes 8.4 alone, 23 MB at 2.8 TB/s where memory gives 4.1: the rest
is its beginning, and the end, where u waits for a row of Wu; the second takes 3.1, which are
latencies one after the other (528 blocks that do nothing take 0.9). With more tokens u grows, a dot
product for each token and neuron by itself; from 64 on the dense layer is faster (32 against 39).

Every sum is in a fixed order, without atomics: the same bits in every run. Nothing waits for the
GPU, all of it can be recorded in a graph. NaN fires.
"""

import functools

import numpy as np

from twell_numba.device.gpu import DeviceArray, Kernel, empty, kernel, zeros
from twell_numba.device.gpu.language import (
    arithmetic_type,
    block_sum,
    cuda,
    device_function,
    global_thread,
    load,
    number,
    store,
    types,
    warp_sum,
)
from twell_numba.device.gpu.tensor_cores import OLDEST_CAPABILITY, inlined
from twell_numba.kernels.cuda_vectors import (
    add_unless_zero,
    eight_zeros,
    load_aligned,
    load_eight,
    round_like,
    store_eight,
)
from twell_numba.kernels.device_checks import arithmetic_dtype, rows_are_aligned
from twell_numba.kernels.device_ffn_checks import forward_arrays
from twell_numba.kernels.twell.aligned_decode import (
    WIDEST_TOKEN,
    blocks_for_a_token,
    blocks_of_one_wave,
    divisor,
    fits_in_one_wave,
    hidden_in_one_wave,
    hidden_of_token,
    hidden_of_tokens,
    outputs_of_tokens,
    prefetch,
)
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.cuda_language import (
    ballot,
    block_prefix,
    count_bits,
    lowest_bit,
)
from twell_numba.kernels.twell.cuda_registers import dot_eight, keep, kept
from twell_numba.kernels.twell.cuda_tail import sum_of_warps

MOST_TOKENS = 32
# Of DeviceActivations: every row is in the tail, its tiles are empty.
TILE, SLOTS = 65536, 1

# A warp goes through the rows of so many neurons at once, for so many tokens.
NEURONS_OF_A_WARP = 2
TOKENS_OF_A_WARP = 4
# Chunks of 256 numbers that are asked for before the first is used, at most.
CHUNKS_AHEAD = 4
UP_CHUNKS_AHEAD = 8
WARP_THREADS = 128
# Aligned rows up to this have kernels compiled for their width.
WIDEST_CONSTANT = 8192

OUTPUT_THREADS = 256
# Neurons that a thread looks at before those that fire are worked on.
NEURONS_OF_A_THREAD = 24
# Entries of a warp whose rows are asked for before the first is used.
UNROLL = 4


def decode_forward(
    x: DeviceArray,
    gate_weight: DeviceArray | None,
    up_weight: DeviceArray,
    down_weight: DeviceArray,
) -> tuple[DeviceArray, DeviceActivations]:
    """Compute y = (relu(x Wg^T) * (x Wu^T)) Wd, or y = relu(x Wu^T) Wd, for few tokens.

    Parameters
    ----------
    x : DeviceArray, shape (M, D)
        float32, bfloat16, float16 or float64; sums are in float32 or wider. M is at most 32.
    gate_weight : DeviceArray, shape (F, D), or None
        Neuron-major, of x's dtype. None: a two-matrix layer.
    up_weight, down_weight : DeviceArray, shape (F, D)

    Returns
    -------
    y : DeviceArray, shape (M, D)
    activations : DeviceActivations
        With all rows in the tail, for the backward pass and the statistics.

    Raises
    ------
    TypeError
        If the dtypes differ or are not floats.
    ValueError
        If M is above 32, shapes do not fit together, or arrays are on different GPUs.
    """
    gated = gate_weight is not None
    weights = {"gate_weight": gate_weight} if gated else {}
    rows, width, neurons = forward_arrays(
        x=x, **weights, up_weight=up_weight, down_weight=down_weight
    )
    if rows > MOST_TOKENS:
        raise ValueError(f"x of {rows} rows given, at most {MOST_TOKENS} wanted")
    pattern_weight = up_weight if gate_weight is None else gate_weight
    stream, sums = x.stream, arithmetic_dtype(x.dtype)
    tiles = -(-neurons // TILE)
    entries = (rows, tiles * SLOTS)
    packed = DeviceActivations(
        neurons=neurons,
        tile=TILE,
        slots=SLOTS,
        gated=gated,
        values=empty(entries, x.dtype, stream),
        columns=empty(entries, np.uint16, stream),
        counts=empty((rows, tiles), np.int32, stream),
        up_values=empty(entries if gated else (0, 0), x.dtype, stream),
        tail_rows=empty(rows, np.int32, stream),
        tail_count=empty(1, np.int32, stream) if rows else zeros(1, np.int32, stream),
        tail_values=empty((rows, neurons), x.dtype, stream),
        is_compact=False,
        row_nonzeros=empty(rows, np.int32, stream),
        row_absolute_sums=empty(rows, sums, stream),
        fired=empty(neurons, np.bool_, stream) if rows else zeros(neurons, np.bool_, stream),
    )
    gate = packed.tail_values
    hidden = empty(gate.shape, sums, stream) if gated else gate
    y = empty(x.shape, x.dtype, stream)
    layer = (x, pattern_weight, up_weight, down_weight, gate, hidden, packed.fired)
    statistics = (
        packed.row_nonzeros, packed.row_absolute_sums, packed.counts, packed.tail_rows,
        packed.tail_count,
    )  # fmt: skip
    blocks = rows * (-(-width // 256) + 1)
    is_aligned = bool(rows_are_aligned(*layer[:4]))
    if _is_for_aligned_kernels(x, neurons, is_aligned):
        _launch_aligned_hidden(layer, gated)
        outputs_kernel = outputs_of_tokens()
    else:
        _launch_hidden(layer, gated, is_aligned)
        outputs_kernel = outputs(is_aligned, neurons % 8 == 0)
    outputs_kernel(blocks, down_weight, hidden, y, *statistics, rows, neurons, width, tiles)
    return y, packed


def _is_for_aligned_kernels(x: DeviceArray, neurons: int, is_aligned: bool) -> bool:
    """Return whether the kernels of :mod:`aligned_decode` can do it."""
    rows, width = x.shape
    return (
        is_aligned
        and x.dtype.itemsize == 2
        and width % 256 == 0
        and width > 0
        and neurons % 8 == 0
        and neurons > 0
        and x.gpu.capability >= OLDEST_CAPABILITY
        # one token of more columns does not fit a warp's registers
        and (rows > 1 or width <= WIDEST_TOKEN)
    )


def _launch_aligned_hidden(layer: tuple[DeviceArray, ...], gated: bool) -> None:
    x, weight, *_ = layer
    (rows, width), neurons = x.shape, weight.shape[0]
    multiprocessors = x.gpu.multiprocessors
    if rows == 1 and fits_in_one_wave(width, neurons, multiprocessors):
        blocks = blocks_of_one_wave(multiprocessors)
        hidden_in_one_wave(width, gated)(blocks, *layer, neurons)
    elif rows == 1:
        blocks = blocks_for_a_token(neurons, multiprocessors)
        hidden_of_token(width, gated)(blocks, *layer, neurons)
    elif rows > 1:
        token_tiles = 1 << (-(-rows // 8) - 1).bit_length()
        blocks = -(-neurons // 16)
        hidden_of_tokens(width, gated, token_tiles)(blocks, *layer, rows, neurons)


def _launch_hidden(layer: tuple[DeviceArray, ...], gated: bool, is_aligned: bool) -> None:
    x, weight, *_ = layer
    (rows, width), neurons = x.shape, weight.shape[0]
    if rows == 0:
        return
    constant_width = width if is_aligned and width <= WIDEST_CONSTANT else 0
    tokens = min(TOKENS_OF_A_WARP, 1 << (rows - 1).bit_length())
    by_warps = hidden_by_warps(constant_width, gated, tokens)
    blocks = by_warps.blocks_of_warps(-(-neurons // NEURONS_OF_A_WARP))
    by_warps(blocks, *layer, rows, neurons, width, int(is_aligned))


@device_function
def prefetch_row(matrix, start, width):
    """Call a row into the second-level cache; a warp does it together."""
    d = types.int64(cuda.threadIdx.x % 32) * 32
    while d < width:
        prefetch(matrix, start + d)
        d += 32 * 32


@device_function
def load_chunk(whole, matrix, start, d, width, is_aligned):
    """Return eight numbers of a row; ``whole`` says that none of them is past its end."""
    if whole:
        numbers = load_aligned(matrix, start + d)
    else:
        numbers = load_eight(matrix, start, d, width, is_aligned)
    return numbers


@inlined
def dot_of_rows(held, ahead, whole, x, x_start, weight, weight_start, width, is_aligned):
    """Return the product of two rows, ``ahead`` chunks of the weights asked for at a time.

    ``held`` is a local array of ``8 * ahead`` numbers. A warp does it together.
    """
    total = number(x, 0)
    d = types.int64(cuda.threadIdx.x % 32) * 8
    first = types.int64(0)
    while first < width:
        for a in range(ahead):
            numbers = load_chunk(whole, weight, weight_start, d + 256 * a, width, is_aligned)
            keep(held, 8 * a, numbers)
        for a in range(ahead):
            numbers = load_chunk(whole, x, x_start, d + 256 * a, width, is_aligned)
            total += dot_eight(held, 8 * a, numbers)
        d += 256 * ahead
        first += 256 * ahead
    return warp_sum(total)


@functools.cache
def hidden_by_warps(constant_width: int, gated: bool, tokens: int) -> Kernel:
    """Return the kernel in which a warp takes a few neurons.

    ``hidden_by_warps(constant_width, gated, tokens)(blocks, x, pattern_weight, up_weight,
    down_weight, gate, hidden, fired, rows, neurons, width, is_aligned)``; ``constant_width`` is D,
    for rows that are aligned, or 0.
    """
    per_warp = NEURONS_OF_A_WARP
    pairs = per_warp * tokens
    chunks = -(-constant_width // 256)
    ahead, up_ahead = divisor(chunks, CHUNKS_AHEAD), divisor(chunks, UP_CHUNKS_AHEAD)
    whole = constant_width != 0 and constant_width % 256 == 0
    numbers_held, up_numbers_held = 8 * per_warp * ahead, 8 * up_ahead

    @kernel(threads=WARP_THREADS)
    def hidden_by_warps(
        x, pattern_weight, up_weight, down_weight, gate, hidden, fired, rows, neurons, width,
        is_aligned,
    ):  # fmt: skip
        held = cuda.local.array(numbers_held, arithmetic_type(x))
        up_held = cuda.local.array(up_numbers_held, arithmetic_type(x))
        sums = cuda.local.array(pairs, arithmetic_type(x))
        if constant_width != 0:
            width = types.int64(constant_width)
            is_aligned = types.int64(1)
        lane = types.int64(cuda.threadIdx.x % 32)
        first = global_thread() // 32 * per_warp
        # of the neuron and token that this lane has the product of
        neuron, own_token = first + lane // tokens, lane % tokens
        has_fired = 0
        token = types.int64(0)
        while first < neurons and token < rows:
            for i in range(pairs):
                sums[i] = number(x, 0)
            d = lane * 8
            while d - lane * 8 < width:
                for a in range(ahead):
                    for r in range(per_warp):
                        # a neuron or token past the end is another's, computed again and left
                        start = min(first + r, neurons - 1) * width
                        numbers = load_chunk(
                            whole, pattern_weight, start, d + 256 * a, width, is_aligned
                        )
                        keep(held, 8 * (a * per_warp + r), numbers)
                for a in range(ahead):
                    for t in range(tokens):
                        start = min(token + t, rows - 1) * width
                        numbers = load_chunk(whole, x, start, d + 256 * a, width, is_aligned)
                        for r in range(per_warp):
                            dot = dot_eight(held, 8 * (a * per_warp + r), numbers)
                            sums[r * tokens + t] += dot
                d += 256 * ahead
            own = number(x, 0)
            for i in range(pairs):
                total = warp_sum(sums[i])
                if lane == i:
                    own = round_like(x, total)
            fires = 0
            place = (token + own_token) * neurons + neuron
            if lane < pairs and neuron < neurons and token + own_token < rows:
                if not own <= 0:
                    fires = 1
                else:
                    own = number(x, 0)
                    if gated:
                        store(hidden, place, own)
                store(gate, place, own)
            firing = types.int64(ballot(fires)) & 0xFFFFFFFF
            while firing != 0:
                i = lowest_bit(firing)
                weights = (first + i // tokens) * width
                prefetch_row(down_weight, weights, width)
                if gated:
                    inputs = (token + i % tokens) * width
                    up = dot_of_rows(
                        up_held, up_ahead, whole, x, inputs, up_weight, weights, width, is_aligned
                    )
                    if lane == i:
                        own *= round_like(x, up)
                        store(hidden, place, own)
                firing &= firing - 1
            if fires == 1 and own != 0:
                has_fired = 1
            token += tokens
        firing = types.int64(ballot(has_fired)) & 0xFFFFFFFF
        if lane < pairs and own_token == 0 and neuron < neurons:
            any_fired = (firing >> lane) & ((1 << tokens) - 1)
            store(fired, neuron, types.int64(any_fired != 0))

    return hidden_by_warps


@functools.cache
def outputs(is_aligned: bool, is_hidden_aligned: bool) -> Kernel:
    """Return the second kernel: y, and the statistics of rows.

    ``outputs(is_aligned, is_hidden_aligned)(blocks, down_weight, hidden, y, nonzeros,
    absolute_sums, counts, tail_rows, tail_count, rows, neurons, width, tiles)``; of each token's
    blocks, one for every 256 columns and one more, the last counts, and marks the row as one of the
    tail.
    """
    list_size, parts_size = NEURONS_OF_A_THREAD * OUTPUT_THREADS, 8 * OUTPUT_THREADS
    unroll, numbers_held = UNROLL, 8 * UNROLL

    @kernel(threads=OUTPUT_THREADS)
    def outputs(
        down_weight, hidden, y, nonzeros, absolute_sums, counts, tail_rows, tail_count, rows,
        neurons, width, tiles,
    ):  # fmt: skip
        neuron_of = cuda.shared.array(list_size, types.int32)
        parts = cuda.shared.array(parts_size, arithmetic_type(y))
        held = cuda.local.array(numbers_held, arithmetic_type(y))
        factors = cuda.local.array(unroll, arithmetic_type(y))
        thread = types.int64(cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        warps = types.int64(cuda.blockDim.x) // 32
        chunks = (width + 255) // 256
        row = cuda.blockIdx.x // (chunks + 1)
        chunk = cuda.blockIdx.x % (chunks + 1)
        d = chunk * 256 + lane * 8
        start = row * neurons
        sums = eight_zeros(y)
        count = types.int64(0)
        absolute_sum = number(y, 0)
        first = thread * NEURONS_OF_A_THREAD
        while first - thread * NEURONS_OF_A_THREAD < neurons:
            firing = types.int64(0)
            for g in range(NEURONS_OF_A_THREAD // 8):
                eight = load_eight(hidden, start, first + 8 * g, neurons, is_hidden_aligned)
                for i in range(8):
                    if eight[i] != 0:
                        firing |= types.int64(1) << (8 * g + i)
            place, total = block_prefix(count_bits(firing))
            while firing != 0:
                neuron_of[place] = first + lowest_bit(firing)
                place += 1
                firing &= firing - 1
            cuda.syncthreads()  # the list is there
            if chunk == chunks:
                count += total
                i = thread
                while i < total:
                    absolute_sum += abs(load(hidden, start + neuron_of[i]))
                    i += cuda.blockDim.x
            elif d < width:
                i = warp
                while i < total:
                    for r in range(unroll):
                        # past the end the last once more, for nothing: loads without branches
                        entry = i + r * warps
                        neuron = types.int64(neuron_of[min(entry, total - 1)])
                        value = number(y, load(hidden, start + neuron))
                        factors[r] = value if entry < total else number(y, 0)
                        numbers = load_eight(down_weight, neuron * width, d, width, is_aligned)
                        keep(held, 8 * r, numbers)
                    for r in range(unroll):
                        sums = add_unless_zero(sums, factors[r], kept(held, 8 * r))
                    i += unroll * warps
            cuda.syncthreads()  # the list is not needed any more
            first += NEURONS_OF_A_THREAD * types.int64(cuda.blockDim.x)
        if chunk == chunks:
            total_of_row = block_sum(absolute_sum)
            if thread == 0:
                store(nonzeros, row, count)
                store(absolute_sums, row, total_of_row)
                store(tail_rows, row, row)
                store(tail_count, 0, rows)
                for t in range(tiles):
                    store(counts, row * tiles + t, 0)
        else:
            sums = sum_of_warps(parts, sums)
            if thread < 32:
                store_eight(y, row * width, d, width, sums, is_aligned)

    return outputs
