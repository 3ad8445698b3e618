"""Which tokens make up a block together, on a GPU: those for which the same neurons fire.

    group(m) = argmax_k sum of scores[j, k] over the neurons j that fire for token m
    order    = the tokens by group, ascending in each

A block of tokens needs the weights of all neurons that fire for any of them. In text, 128 tokens
that follow each other need each of their neurons for 2 to 5 of them; 128 tokens of one group, for 4
to 8, with scores from :mod:`learned_groups`. Scores are integers of 7 bits, so that sums are exact.

A warp takes a token: it lists its neurons in shared memory, then adds up their rows of scores, 128
bytes each, of four neurons at a time, two sums in a word. Bound by the latency of few dependent
steps. Then a block takes a group and counts, in all tokens, those of groups before it and its own.

On an H200, M 16384, F 5632, trained layers with 16, 24 and 34 entries a row, in us: finding groups
16, 18 and 22, placing tokens 5. With scores in bfloat16, two neurons at a time, and groups in 32
bits: 30, 32, 41, and 12.
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    intrinsic,
    load,
    store,
    types,
)
from twell_numba.kernels.cuda_vectors import _load_words
from twell_numba.kernels.twell.cuda_activations import DeviceActivations, HotNeurons
from twell_numba.kernels.twell.cuda_language import prefix_of_block, prefix_of_warp

_i32 = ir.IntType(32)

GROUPS = 128
HIGHEST_SCORE = 127
THREADS = 256
# Neurons of a token by which it is grouped, at most: any more change little. So many times the
# highest score is less than 2^15.
MOST_FIRING = 256
LISTED = MOST_FIRING * THREADS // 32
PLACING_THREADS = 1024


@dataclass(frozen=True, eq=False)
class LearnedPattern:
    """How tokens are told apart by which neurons fire for them.

    Attributes
    ----------
    scores : DeviceArray of uint8, shape (F, 128)
        How much a neuron that fires speaks for each group, up to 127. Groups with neurons in common
        stand side by side. Never changed.
    hot : HotNeurons or None
        Neurons whose weight gradients are dense products, where that is faster; None if none are.
    """

    scores: DeviceArray
    hot: HotNeurons | None = None


def order_tokens(packed: DeviceActivations, learned: LearnedPattern) -> DeviceArray:
    """Return the tokens by group, ascending in each; nothing waits.

    Returns
    -------
    DeviceArray of int32, shape (M,)
    """
    rows, stream = packed.shape[0], packed.values.stream
    group_of = room_for_groups(packed)
    order = empty(rows, np.int32, stream)
    find_groups(packed, learned.scores, group_of)
    place_tokens(GROUPS, group_of, order, rows)
    return order


def room_for_groups(packed: DeviceActivations) -> DeviceArray:
    """Return an array of uint8 for each token's group, which is read by 16 bytes."""
    return empty(-(-packed.shape[0] // 16) * 16, np.uint8, packed.values.stream)


def find_groups(packed: DeviceActivations, scores: DeviceArray, group_of: DeviceArray) -> None:
    """Write each token's group."""
    rows = packed.shape[0]
    group_tokens(
        group_tokens.blocks_of_warps(rows), packed.columns, packed.counts, scores, group_of, rows,
        packed.tile, packed.tiles, packed.slots,
    )  # fmt: skip


@device_function
def list_firing(listed, columns, counts, row, tile, tiles, slots):
    """Write the first neurons of a row, and return how many of them; a warp does.

    ``listed`` is shared by the warps of a block; neurons lie in the order of the row.
    """
    lane = types.int32(cuda.threadIdx.x % 32)
    start = types.int32(cuda.threadIdx.x // 32 * MOST_FIRING)
    firing = types.int32(0)
    first = types.int32(0)
    while first < tiles and firing < MOST_FIRING:
        t = types.int32(first + lane)
        count = types.int32(0)
        if t < tiles:
            count = types.int32(load(counts, row * tiles + t))
        before, total = prefix_of_warp(count)
        at = types.int32(firing + before)
        count = min(count, types.int32(MOST_FIRING - at))
        cell = (row * tiles + t) * slots
        slot = types.int32(0)
        while slot < count:
            last = types.int32(count - 1)
            # past the last entry it is taken again
            a = load(columns, cell + slot)
            b = load(columns, cell + min(types.int32(slot + 1), last))
            c = load(columns, cell + min(types.int32(slot + 2), last))
            d = load(columns, cell + min(types.int32(slot + 3), last))
            place = types.int32(start + at)
            listed[place + slot] = types.int32(t * tile + a)
            listed[place + min(types.int32(slot + 1), last)] = types.int32(t * tile + b)
            listed[place + min(types.int32(slot + 2), last)] = types.int32(t * tile + c)
            listed[place + min(types.int32(slot + 3), last)] = types.int32(t * tile + d)
            slot = types.int32(slot + 4)
        firing = types.int32(firing + total)
        first = types.int32(first + 32)
    cuda.syncwarp()
    return min(firing, types.int32(MOST_FIRING))


def _load_sixteen_bytes(typing_context, pointer, index):
    def generate(context, builder, signature, arguments):
        position = context.cast(builder, arguments[1], signature.args[1], types.int64)
        words = _load_words(builder, builder.gep(arguments[0], [position]), _i32, 4)
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.int32, 4)(pointer, index), generate


def _load_bytes_one_by_one(pointer, index, definition=_load_sixteen_bytes):
    """What load_sixteen_bytes does; see below."""
    places = [[index + 4 * word + i for i in range(4)] for word in range(4)]
    words = [bytes(int(load(pointer, place)) for place in word) for word in places]
    return tuple(types.int32(int.from_bytes(word, "little", signed=True)) for word in words)


# load_sixteen_bytes(pointer, index) returns bytes as four words; the index is a multiple of 16. The
# plain function is what tests without a GPU run.
load_sixteen_bytes = intrinsic(_load_sixteen_bytes)
load_sixteen_bytes.py_func = _load_bytes_one_by_one


@device_function
def add_scores(sums, scores, neuron, own):
    """Add 16 scores to eight words of two sums each."""
    a, b, c, d = load_sixteen_bytes(scores, types.int64(neuron) * GROUPS + own)
    every_other = types.int32(0x00FF00FF)
    return (
        types.int32(sums[0] + (a & every_other)),
        types.int32(sums[1] + (a >> 8 & every_other)),
        types.int32(sums[2] + (b & every_other)),
        types.int32(sums[3] + (b >> 8 & every_other)),
        types.int32(sums[4] + (c & every_other)),
        types.int32(sums[5] + (c >> 8 & every_other)),
        types.int32(sums[6] + (d & every_other)),
        types.int32(sums[7] + (d >> 8 & every_other)),
    )


@device_function
def best_of_word(best, word, group):
    """Return the highest of scores with their groups, two more of them in a word."""
    # of two alike the lower group
    low = types.int32((word & 0xFFFF) << 7 | (GROUPS - 1 - group))
    high = types.int32((word >> 16) << 7 | (GROUPS - 3 - group))
    return max(best, max(low, high))


@kernel(threads=THREADS)
def group_tokens(columns, counts, scores, group_of, rows, tile, tiles, slots):
    """Find each token's group; a warp takes a token, a quarter of it every fourth neuron."""
    listed = cuda.shared.array(LISTED, types.int32)
    start = types.int32(cuda.threadIdx.x // 32 * MOST_FIRING)
    quarter = types.int32(cuda.threadIdx.x % 32 // 8)
    own = types.int32(cuda.threadIdx.x % 8 * 16)
    row = global_thread() // 32
    while row < rows:
        firing = list_firing(listed, columns, counts, row, tile, tiles, slots)
        zero = types.int32(0)
        sums = (zero, zero, zero, zero, zero, zero, zero, zero)
        e = quarter
        while e < firing:
            sums = add_scores(sums, scores, listed[start + e], own)
            e = types.int32(e + 4)
        best = types.int32(0)
        for i in range(8):
            word = sums[i]
            word = types.int32(word + cuda.shfl_xor_sync(FULL_WARP, word, 8))
            word = types.int32(word + cuda.shfl_xor_sync(FULL_WARP, word, 16))
            best = best_of_word(best, word, types.int32(own + i // 2 * 4 + i % 2))
        best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 1))
        best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 2))
        best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 4))
        if cuda.threadIdx.x % 32 == 0:
            store(group_of, row, GROUPS - 1 - (best & (GROUPS - 1)))
        cuda.syncwarp()  # the next row's neurons go to the same place
        row += grid_threads() // 32


@device_function
def compare_word(word, group, left):
    """Return how many of the first bytes of a word are less than one, and equal to it."""
    earlier = types.int32(0)
    own = types.int32(0)
    for i in range(4):
        found = types.int32(word >> (8 * i) & 0xFF)
        earlier = types.int32(earlier + (1 if i < left and found < group else 0))
        own = types.int32(own + (1 if i < left and found == group else 0))
    return earlier, own


@device_function
def compare_groups(group_of, first, end, group):
    """Return how many of some tokens are of groups before one, and of it."""
    earlier = types.int32(0)
    own = types.int32(0)
    m = first
    while m < end:
        words = load_sixteen_bytes(group_of, m)
        for i in range(4):
            more_earlier, more_own = compare_word(words[i], group, types.int32(end - m - 4 * i))
            earlier = types.int32(earlier + more_earlier)
            own = types.int32(own + more_own)
        m += 16
    return earlier, own


@kernel(threads=PLACING_THREADS)
def place_tokens(group_of, order, rows):
    """Write a group's tokens to the order; a block each, whose threads have rows side by side."""
    parts = cuda.shared.array(66, types.int32)
    group = types.int32(cuda.blockIdx.x)
    most = ((rows + 15) // 16 + cuda.blockDim.x - 1) // cuda.blockDim.x * 16
    first = min(types.int64(cuda.threadIdx.x) * most, rows)
    end = min(first + most, rows)
    earlier, own = compare_groups(group_of, first, end, group)
    _, start = prefix_of_block(earlier, parts)
    before, _ = prefix_of_block(own, parts)
    place = types.int32(start + before)
    if own > 0:
        for m in range(first, end):
            if types.int32(load(group_of, m)) == group:
                store(order, place, m)
                place = types.int32(place + 1)
