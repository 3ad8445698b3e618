"""Kernels of :mod:`cuda_decode` for aligned rows of 16-bit numbers, where most of the time goes.

    1. g = x Wg^T, and at once u = x Wu^T, h = relu(g) * u where a neuron fires
    2. y = h Wd                                           (two matrices: h = relu(x Wu^T))

with x, y (M, D), M up to 32, D a multiple of 256, weights (F, D), F a multiple of 8. relu(g) and h
are written for all neurons, 0 where one does not fire.

For one token a warp takes its share of the neurons. If that is three at most, it asks for all their
rows at once (:func:`hidden_in_one_wave`), otherwise it goes on by twos (:func:`hidden_of_token`).
For more tokens a block takes 16 neurons on tensor cores: weights are the left operand, straight
from memory, x the right one, and the block's warps share D. Rows of Wd that will be wanted are
called into the second-level cache as soon as a neuron fires. In the second kernel a block takes 256
columns of a token, lists the neurons whose h is not 0, and its warps share them.

Versions tried, in microseconds on one H200 (D = 2048, F = 5632, bfloat16, 29 neurons firing,
weights from memory), of the first kernel alone and of both:

    M = 1                                                          first  both
        three rows at once, once, with loads of 256 bytes            8.4  11.4
        three rows at once, once                                     8.4  11.5
        two rows at once, 16 warps a multiprocessor                  8.7  11.8
        one row at once, 24 warps                                    8.7  11.9
        two rows / one row at once, with loads of 256 bytes     9.7/13.8  12.6/16.9
    M = 4
        4 warps a block, registers for 3 blocks beside each other    9.9  13.4
        registers for 5 blocks / as the compiler likes         10.2/12.6  13.6/16.0
        8 warps a block                                             12.1  15.5
    M = 16
        4 warps a block, registers for 3 blocks beside each other   12.6  16.6
        as the compiler likes                                       16.6  20.6
        8 warps a block, as the compiler likes / 2 blocks      14.4/14.7  18.4/18.7
    M = 32
        8 warps a block, as the compiler likes                      22.9  27.3

and of earlier versions, when two rows at once took 8.2:

    first kernel, M = 1
        all warps in one grid, blocks following one another     8.5 to 9.0
        a block's rows of Wg called into the cache at once      9.5 to 11
        on tensor cores                                         9.7
    first kernel, M = 32
        h not written where no neuron fires, rows of Wu called
        into the cache, too                                     17.7
    second kernel, M = 1: 3.4, now 3.1
        a list for each warp                                    3.5 to 4.1
        512 / 1024 / 2048 columns a block                       4.0 / 5.2 / 7.5
    both, M = 1: 11.7
        each launched before the one before it has ended        11.9 to 12.3
"""

import functools

from llvmlite import ir

from twell_numba.device.gpu import Kernel, kernel
from twell_numba.device.gpu.language import (
    cuda,
    device_function,
    intrinsic,
    load,
    store,
    types,
    warp_sum,
)
from twell_numba.device.gpu.tensor_cores import (
    eight_numbers_of,
    inlined,
    load_four_words,
    multiply_add,
)
from twell_numba.kernels.cuda_vectors import load_aligned, round_like
from twell_numba.kernels.twell.cuda_language import ballot, count_bits, lowest_bit, warp_prefix
from twell_numba.kernels.twell.cuda_registers import keep

# The kernels for one token, of D up to this; their blocks all run at the same time.
WIDEST_TOKEN = 2048
TOKEN_THREADS, TOKEN_BLOCKS = 128, 4
NEURONS_AT_ONCE = 2
WAVE_THREADS, WAVE_BLOCKS = 128, 4
NEURONS_OF_A_WAVE = 3

# The kernel for more tokens: warps of a block, and blocks that are to fit beside each other, for
# up to 16 tokens and for more. Steps of 32 columns whose weights are asked for ahead of their use.
WARPS_FOR_SIXTEEN, BLOCKS_FOR_SIXTEEN = 4, 3
WARPS_FOR_MORE, BLOCKS_FOR_MORE = 8, 0
STEPS_AHEAD = 8
# Chunks of 256 columns of Wu that are asked for before the first is used.
CHUNKS_AHEAD = 8

# The second kernel: eights of neurons that a thread looks at before those that fire are worked on,
# and entries of a warp whose rows are asked for before the first is used.
OUTPUT_THREADS = 256
OCTETS = 3
UNROLL = 4


def _prefetch(typing_context, pointer, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.ptrtoint(builder.gep(arguments[0], [position]), ir.IntType(64))
        shape = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        code = ir.InlineAsm(shape, "prefetch.global.L2 [$0];", "l", side_effect=True)
        builder.call(code, [address])
        return context.get_dummy_value()

    return types.void(pointer, index), generate


def _prefetch_nothing(pointer, index, definition=_prefetch):
    """What prefetch does to memory; see below."""
    load(pointer, index)


def _load_streamed(typing_context, pointer, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        address = builder.ptrtoint(builder.gep(arguments[0], [position]), ir.IntType(64))
        word = ir.IntType(32)
        shape = ir.FunctionType(ir.LiteralStructType([word] * 4), [ir.IntType(64)])
        text = "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];"
        code = ir.InlineAsm(shape, text, "=r,=r,=r,=r,l", side_effect=False)
        four = builder.call(code, [address])
        words = [builder.extract_value(four, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint32, 4)(pointer, index), generate


def _load_words(pointer, index, definition=_load_streamed):
    """What load_streamed does; see below."""
    return load_four_words(pointer, index)


# prefetch(pointer, index) calls what is there into the second-level cache. load_streamed is
# load_four_words for what the kernel never writes and a block reads once: that cache is asked to
# get 256 bytes around it, the first-level one to keep nothing. The plain functions are what tests
# without a GPU run; see cuda_language.
prefetch = intrinsic(_prefetch)
prefetch.py_func = _prefetch_nothing
load_streamed = intrinsic(_load_streamed)
load_streamed.py_func = _load_words


@device_function
def prefetch_row(matrix, start, width):
    """Call a row of 16-bit numbers into the second-level cache; a warp does it together."""
    d = types.int64(cuda.threadIdx.x % 32) * 64
    while d < width:
        prefetch(matrix, start + d)
        d += 32 * 64


@inlined
def hold(words, first, four):
    """Write four words to a local array."""
    words[first] = four[0]
    words[first + 1] = four[1]
    words[first + 2] = four[2]
    words[first + 3] = four[3]


@inlined
def numbers_at(pointer, words, first):
    """Return the eight numbers in four words of a local array."""
    four = (words[first], words[first + 1], words[first + 2], words[first + 3])
    return eight_numbers_of(pointer, four)


@inlined
def add_dot(sums, i, a, b):
    """Add the product of eight numbers and eight others to two sums."""
    even, odd = sums[i], sums[i + 1]
    even += a[0] * b[0]
    odd += a[1] * b[1]
    even += a[2] * b[2]
    odd += a[3] * b[3]
    even += a[4] * b[4]
    odd += a[5] * b[5]
    even += a[6] * b[6]
    odd += a[7] * b[7]
    sums[i], sums[i + 1] = even, odd


def divisor(count: int, most: int) -> int:
    """Return the largest divisor of ``count``, at most ``most``; 1 for 0."""
    return max(n for n in range(1, most + 1) if count % n == 0 and (count or n == 1))


def blocks_for_a_token(neurons: int, multiprocessors: int) -> int:
    """Return how many blocks of :func:`hidden_of_token` share these neurons."""
    of_a_block = NEURONS_AT_ONCE * TOKEN_THREADS // 32
    return min(multiprocessors * TOKEN_BLOCKS, -(-neurons // of_a_block))


@functools.cache
def hidden_of_token(width: int, gated: bool) -> Kernel:
    """Return the first kernel for one token, of D up to 2048 and any number of neurons.

    ``hidden_of_token(width, gated)(blocks, x, pattern_weight, up_weight, down_weight, gate, hidden,
    fired, neurons)``; see :func:`blocks_for_a_token`.
    """
    at_once, chunks = NEURONS_AT_ONCE, width // 256
    words, words_held, sums_held = 4 * chunks, 4 * chunks * at_once, 2 * at_once
    most_pending = 30 // at_once * at_once

    @kernel(threads=TOKEN_THREADS, blocks_per_multiprocessor=TOKEN_BLOCKS)
    def hidden_of_token(
        x, pattern_weight, up_weight, down_weight, gate, hidden, fired, neurons
    ):  # fmt: skip
        inputs = cuda.local.array(words, types.uint32)
        held = cuda.local.array(words_held, types.uint32)
        sums = cuda.local.array(sums_held, types.float32)
        lane = types.int64(cuda.threadIdx.x % 32)
        d = lane * 8
        for c in range(chunks):
            hold(inputs, 4 * c, load_four_words(x, d + 256 * c))
        # warps take shares that differ by one at most, the larger ones spread over blocks
        warps = cuda.gridDim.x * (cuda.blockDim.x // 32)
        own = types.int64(cuda.threadIdx.x // 32) * cuda.gridDim.x + cuda.blockIdx.x
        share = types.int64(types.uint32(neurons) // types.uint32(warps))
        more = neurons - share * warps
        first = own * share + min(own, more)
        end = first + share
        if own < more:
            end += 1
        while first < end:
            base = first
            pending = types.int64(0)
            while first < end and first - base < most_pending:
                for c in range(chunks):
                    for r in range(at_once):
                        # a neuron past the end is the last, computed again and left
                        start = min(first + r, end - 1) * width
                        four = load_four_words(pattern_weight, start + d + 256 * c)
                        hold(held, 4 * (c * at_once + r), four)
                for r in range(sums_held):
                    sums[r] = types.float32(0)
                for c in range(chunks):
                    numbers = numbers_at(x, inputs, 4 * c)
                    for r in range(at_once):
                        weights = numbers_at(x, held, 4 * (c * at_once + r))
                        add_dot(sums, 2 * r, numbers, weights)
                value = types.float32(0)
                for r in range(at_once):
                    total = warp_sum(sums[2 * r] + sums[2 * r + 1])
                    if lane == r:
                        value = round_like(x, total)
                fires = 0
                neuron = first + lane
                if lane < at_once and neuron < end:
                    if not value <= 0:
                        fires = 1
                    else:
                        value = types.float32(0)
                        if gated:
                            store(hidden, neuron, value)
                    store(gate, neuron, value)
                    store(fired, neuron, fires)
                firing = types.int64(ballot(fires)) & ((1 << at_once) - 1)
                pending |= firing << (first - base)
                while firing != 0:
                    start = (first + lowest_bit(firing)) * width
                    if gated:
                        prefetch_row(up_weight, start, width)
                    prefetch_row(down_weight, start, width)
                    firing &= firing - 1
                first += at_once
            while gated and pending != 0:
                i = lowest_bit(pending)
                neuron = base + i
                for c in range(chunks):
                    hold(held, 4 * c, load_four_words(up_weight, neuron * width + d + 256 * c))
                sums[0] = types.float32(0)
                sums[1] = types.float32(0)
                for c in range(chunks):
                    add_dot(sums, 0, numbers_at(x, inputs, 4 * c), numbers_at(x, held, 4 * c))
                up = round_like(x, warp_sum(sums[0] + sums[1]))
                if lane == i % at_once:
                    # this lane has written g
                    value = load(gate, neuron) * up
                    store(hidden, neuron, value)
                    if value == 0:
                        store(fired, neuron, 0)
                pending &= pending - 1

    return hidden_of_token


def blocks_of_one_wave(multiprocessors: int) -> int:
    """Return how many blocks of :func:`hidden_in_one_wave` run at the same time."""
    return multiprocessors * WAVE_BLOCKS


def fits_in_one_wave(width: int, neurons: int, multiprocessors: int) -> bool:
    """Return whether :func:`hidden_in_one_wave` can do it."""
    warps = blocks_of_one_wave(multiprocessors) * WAVE_THREADS // 32
    # a block's threads share x in eights
    return width % (8 * WAVE_THREADS) == 0 and neurons <= NEURONS_OF_A_WAVE * warps


@functools.cache
def hidden_in_one_wave(width: int, gated: bool) -> Kernel:
    """Return the first kernel for one token and few neurons: all rows are asked for at once.

    ``hidden_in_one_wave(width, gated)(blocks, x, pattern_weight, up_weight, down_weight, gate,
    hidden, fired, neurons)``; see :func:`fits_in_one_wave`. Registers are full of weights, so x is
    in shared memory.
    """
    at_once, threads, chunks = NEURONS_OF_A_WAVE, WAVE_THREADS, width // 256
    words_held, sums_held, x_words = 4 * chunks * at_once, 2 * at_once, width // 2
    own_groups = width // (8 * threads)
    own_words = 4 * own_groups

    @kernel(threads=WAVE_THREADS, blocks_per_multiprocessor=WAVE_BLOCKS)
    def hidden_in_one_wave(
        x, pattern_weight, up_weight, down_weight, gate, hidden, fired, neurons
    ):  # fmt: skip
        # by chunk, word of a lane, and lane
        inputs = cuda.shared.array(x_words, types.uint32)
        own_inputs = cuda.local.array(own_words, types.uint32)
        held = cuda.local.array(words_held, types.uint32)
        one = cuda.local.array(4, types.uint32)
        sums = cuda.local.array(sums_held, types.float32)
        lane = types.int64(cuda.threadIdx.x % 32)
        thread = types.int64(cuda.threadIdx.x)
        d = lane * 8
        for g in range(own_groups):
            hold(own_inputs, 4 * g, load_streamed(x, (g * threads + thread) * 8))
        # warps take shares that differ by one at most, the larger ones spread over blocks
        warps = cuda.gridDim.x * (cuda.blockDim.x // 32)
        own = types.int64(cuda.threadIdx.x // 32) * cuda.gridDim.x + cuda.blockIdx.x
        share = types.int64(types.uint32(neurons) // types.uint32(warps))
        more = neurons - share * warps
        first = own * share + min(own, more)
        end = first + share
        if own < more:
            end += 1
        for c in range(chunks):
            for r in range(at_once):
                # a neuron past the end is the last, computed again and left
                start = max(min(first + r, end - 1), 0) * width
                four = load_streamed(pattern_weight, start + d + 256 * c)
                hold(held, 4 * (c * at_once + r), four)
        for g in range(own_groups):
            group = g * threads + thread
            for i in range(4):
                inputs[group // 32 * 128 + i * 32 + lane] = own_inputs[4 * g + i]
        cuda.syncthreads()  # x is there
        for r in range(sums_held):
            sums[r] = types.float32(0)
        for c in range(chunks):
            for i in range(4):
                one[i] = inputs[c * 128 + i * 32 + lane]
            numbers = numbers_at(x, one, 0)
            for r in range(at_once):
                add_dot(sums, 2 * r, numbers, numbers_at(x, held, 4 * (c * at_once + r)))
        value = types.float32(0)
        for r in range(at_once):
            total = warp_sum(sums[2 * r] + sums[2 * r + 1])
            if lane == r:
                value = round_like(x, total)
        fires = 0
        neuron = first + lane
        if lane < at_once and neuron < end:
            if not value <= 0:
                fires = 1
            else:
                value = types.float32(0)
                if gated:
                    store(hidden, neuron, value)
            store(gate, neuron, value)
            store(fired, neuron, fires)
        firing = types.int64(ballot(fires)) & 0xFFFFFFFF
        while firing != 0:
            i = lowest_bit(firing)
            start = (first + i) * width
            if gated:
                for c in range(chunks):
                    hold(held, 4 * c, load_streamed(up_weight, start + d + 256 * c))
            prefetch_row(down_weight, start, width)
            if gated:
                sums[0] = types.float32(0)
                sums[1] = types.float32(0)
                for c in range(chunks):
                    for j in range(4):
                        one[j] = inputs[c * 128 + j * 32 + lane]
                    add_dot(sums, 0, numbers_at(x, one, 0), numbers_at(x, held, 4 * c))
                up = round_like(x, warp_sum(sums[0] + sums[1]))
                if lane == i:
                    value *= up
                    store(hidden, first + i, value)
                    if value == 0:
                        store(fired, first + i, 0)
            firing &= firing - 1

    return hidden_in_one_wave


@functools.cache
def hidden_of_tokens(width: int, gated: bool, token_tiles: int) -> Kernel:
    """Return the first kernel for up to ``8 * token_tiles`` tokens, on tensor cores.

    ``hidden_of_tokens(width, gated, token_tiles)(blocks, x, pattern_weight, up_weight, down_weight,
    gate, hidden, fired, rows, neurons)``; a block takes 16 neurons.
    """
    if token_tiles <= 2:
        warps, blocks = WARPS_FOR_SIXTEEN, BLOCKS_FOR_SIXTEEN
    else:
        warps, blocks = WARPS_FOR_MORE, BLOCKS_FOR_MORE
    steps, chunks = width // (32 * warps), width // 256
    ahead, up_ahead = divisor(steps, STEPS_AHEAD), divisor(chunks, CHUNKS_AHEAD)
    tokens = 8 * token_tiles
    pitch = tokens + 8 if tokens > 8 else tokens  # fewer bank conflicts
    part, entries = 16 * pitch, 16 * tokens
    own_sums, words_held, up_words = 4 * token_tiles, 8 * ahead, 4 * up_ahead

    @kernel(threads=32 * warps, blocks_per_multiprocessor=blocks, shared_memory=4 * warps * part)
    def hidden_of_tokens(
        x, pattern_weight, up_weight, down_weight, gate, hidden, fired, rows, neurons
    ):  # fmt: skip
        parts = cuda.shared.array(0, types.float32)  # by warp, neuron and token
        has_fired = cuda.shared.array(16, types.int32)
        sums = cuda.local.array(own_sums, types.float32)
        held = cuda.local.array(words_held, types.uint32)
        up_held = cuda.local.array(up_words, types.uint32)
        thread = types.int64(cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        group, place = lane // 4, lane % 4
        first = cuda.blockIdx.x * types.int64(16)
        if thread < 16:
            has_fired[thread] = 0
        for i in range(own_sums):
            sums[i] = types.float32(0)
        for outer in range(steps // ahead):
            for a in range(ahead):
                d = (warp * steps + outer * ahead + a) * 32 + place * 8
                for half in range(2):
                    # a neuron past the end is the last, computed again and left
                    neuron = min(first + 8 * half + group, neurons - 1)
                    four = load_four_words(pattern_weight, neuron * width + d)
                    hold(held, 8 * a + 4 * half, four)
            for a in range(ahead):
                d = (warp * steps + outer * ahead + a) * 32 + place * 8
                for n in range(token_tiles):
                    token = load_four_words(x, min(8 * n + group, rows - 1) * width + d)
                    w = 8 * a
                    multiply_add(
                        x, sums, 4 * n, held[w], held[w + 4], held[w + 1], held[w + 5], token[0],
                        token[1],
                    )  # fmt: skip
                    multiply_add(
                        x, sums, 4 * n, held[w + 2], held[w + 6], held[w + 3], held[w + 7],
                        token[2], token[3],
                    )  # fmt: skip
        for n in range(token_tiles):
            i = warp * part + group * pitch + 8 * n + 2 * place
            parts[i] = sums[4 * n]
            parts[i + 1] = sums[4 * n + 1]
            parts[i + 8 * pitch] = sums[4 * n + 2]
            parts[i + 8 * pitch + 1] = sums[4 * n + 3]
        cuda.syncthreads()  # all parts are there
        i = thread
        while i < entries:
            own, token = i // tokens, i % tokens
            at = own * pitch + token
            total = parts[at]
            for w in range(1, warps):
                total += parts[w * part + at]
            value = round_like(x, total)
            is_there = first + own < neurons and token < rows
            if value <= 0 or not is_there:
                value = types.float32(0)
            if is_there:
                store(gate, token * neurons + first + own, value)
                if gated and value == 0:
                    store(hidden, token * neurons + first + own, value)
            parts[at] = value
            i += 32 * warps
        cuda.syncthreads()  # g is there
        turn = types.int64(0)
        for chunk in range(entries // 32):
            i = chunk * 32 + lane
            fires = 0
            if parts[i // tokens * pitch + i % tokens] != 0:
                fires = 1
            firing = types.int64(ballot(fires)) & 0xFFFFFFFF
            while firing != 0:
                i = chunk * 32 + lowest_bit(firing)
                if turn % warps == warp:
                    own, token = i // tokens, i % tokens
                    value = parts[own * pitch + token]
                    prefetch_row(down_weight, (first + own) * width, width)
                    if gated:
                        weights, inputs = (first + own) * width + 8 * lane, token * width + 8 * lane
                        sums[0] = types.float32(0)
                        sums[1] = types.float32(0)
                        for outer in range(chunks // up_ahead):
                            at = outer * up_ahead * 256
                            for a in range(up_ahead):
                                four = load_four_words(up_weight, weights + at + 256 * a)
                                hold(up_held, 4 * a, four)
                            for a in range(up_ahead):
                                four = load_four_words(x, inputs + at + 256 * a)
                                add_dot(
                                    sums, 0, eight_numbers_of(x, four),
                                    numbers_at(x, up_held, 4 * a),
                                )  # fmt: skip
                        value *= round_like(x, warp_sum(sums[0] + sums[1]))
                        if lane == 0:
                            store(hidden, token * neurons + first + own, value)
                    if lane == 0 and value != 0:
                        has_fired[own] = 1
                turn += 1
                firing &= firing - 1
        cuda.syncthreads()  # all have fired that do
        if thread < 16 and first + thread < neurons:
            store(fired, first + thread, has_fired[thread])

    return hidden_of_tokens


@functools.cache
def outputs_of_tokens() -> Kernel:
    """Return the second kernel: y, and the statistics of rows.

    ``outputs_of_tokens()(blocks, down_weight, hidden, y, nonzeros, absolute_sums, counts,
    tail_rows, tail_count, rows, neurons, width, tiles)``; of each token's blocks, one for every 256
    columns and one more, the last counts, and marks the row as one of the tail.
    """
    threads, warps = OUTPUT_THREADS, OUTPUT_THREADS // 32
    octets, unroll = OCTETS, UNROLL
    numbers_held, words_held = 8 * octets, 4 * unroll
    at_once, parts_size = 8 * octets * threads, 256 * warps

    @kernel(threads=OUTPUT_THREADS)
    def outputs_of_tokens(
        down_weight, hidden, y, nonzeros, absolute_sums, counts, tail_rows, tail_count, rows,
        neurons, width, tiles,
    ):  # fmt: skip
        neuron_of = cuda.shared.array(at_once, types.uint16)  # less base
        totals = cuda.shared.array(32, types.int32)
        parts = cuda.shared.array(parts_size, types.float32)
        looked_at = cuda.local.array(numbers_held, types.float32)
        held = cuda.local.array(words_held, types.uint32)
        factors = cuda.local.array(unroll, types.float32)
        sums = cuda.local.array(8, types.float32)
        thread = types.int64(cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        chunks = width // 256
        row = cuda.blockIdx.x // (chunks + 1)
        chunk = cuda.blockIdx.x % (chunks + 1)
        d = min(chunk * 256, width - 256) + lane * 8
        start = row * neurons
        for c in range(8):
            sums[c] = types.float32(0)
        count = types.int64(0)
        absolute_sum = types.float32(0)
        base = types.int64(0)
        while base < neurons:
            for o in range(octets):
                neuron = base + (o * threads + thread) * 8
                keep(looked_at, 8 * o, load_aligned(hidden, start + min(neuron, neurons - 8)))
            firing = types.int64(0)
            for o in range(octets):
                for i in range(8):
                    is_there = base + (o * threads + thread) * 8 < neurons
                    if looked_at[8 * o + i] != 0 and is_there:
                        firing |= types.int64(1) << (8 * o + i)
            place, total = warp_prefix(count_bits(firing))
            if lane == 0:
                totals[warp] = total
            cuda.syncthreads()
            total = types.int64(0)
            for w in range(warps):
                if w < warp:
                    place += totals[w]
                total += totals[w]
            while firing != 0:
                bit = lowest_bit(firing)
                neuron_of[place] = (bit // 8 * threads + thread) * 8 + bit % 8
                place += 1
                firing &= firing - 1
            cuda.syncthreads()  # the list is there
            if chunk == chunks:
                count += total
                entry = thread
                while entry < total:
                    absolute_sum += abs(load(hidden, start + base + neuron_of[entry]))
                    entry += threads
            else:
                entry = warp
                while entry < total:
                    for r in range(unroll):
                        # past the end the last once more, for nothing: loads without branches
                        other = entry + r * warps
                        neuron = base + types.int64(neuron_of[min(other, total - 1)])
                        value = load(hidden, start + neuron)
                        factors[r] = value if other < total else types.float32(0)
                        hold(held, 4 * r, load_four_words(down_weight, neuron * width + d))
                    for r in range(unroll):
                        if factors[r] != 0:
                            numbers = numbers_at(y, held, 4 * r)
                            for c in range(8):
                                sums[c] += factors[r] * numbers[c]
                    entry += unroll * warps
            cuda.syncthreads()  # the list is not needed any more
            base += at_once
        if chunk == chunks:
            total_sum = warp_sum(absolute_sum)
            if lane == 0:
                parts[warp] = total_sum
            cuda.syncthreads()
            if thread == 0:
                for w in range(1, warps):
                    total_sum += parts[w]
                store(nonzeros, row, count)
                store(absolute_sums, row, total_sum)
                store(tail_rows, row, row)
                store(tail_count, 0, rows)
                for t in range(tiles):
                    store(counts, row * tiles + t, 0)
        else:
            for c in range(8):
                parts[(warp * 8 + c) * 32 + lane] = sums[c]
            cuda.syncthreads()  # all parts are there
            i = thread
            while i < 256:
                total_of_column = parts[i]
                for w in range(1, warps):
                    total_of_column += parts[w * 256 + i]
                column = chunk * 256 + i % 32 * 8 + i // 32
                store(y, row * width + column, total_of_column)
                i += threads

    return outputs_of_tokens
