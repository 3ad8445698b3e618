"""Which tokens make up a block together, on a GPU: those for which the same neurons fire.

    s_k(m)   = sum of scores[j, k] over the neurons j that fire for token m
    group(m) = argmax_k s_k(m)
    side(m)  = floor(8 (s_(g+1)(m) - s_(g-1)(m)) / s_g(m) + 4), from 0 to 7, with g = group(m)
    order    = the tokens by group, by side in each, ascending in each of those

(scores of groups that are not there are 0, and the side is 0 where s_g is).

A block of tokens needs the weights of all neurons that fire for any of them. In text, 128 tokens
that follow each other need each of their neurons for 2 to 5 of them; 128 tokens of one group, for 4
to 8, with scores from :mod:`learned_groups`. Scores are integers of 7 bits, so that sums are exact.
Groups that follow each other are alike, so a group's tokens begin with those that are more like the
group before it: a block, which has tokens of two groups or more as a rule, needs 3% to 6% fewer
neurons. Of groups of more than 8192 tokens sides are not looked at.

A warp takes a token: it lists its neurons in shared memory, then adds up their rows of scores, 128
bytes each, of four neurons at a time, two sums in a word. Bound by the latency of few dependent
steps. Then a block takes a group and counts, in all tokens, those of groups before it and its own,
which it lists in shared memory and counts by side.

On an H200, M 16384, F 5632, trained layers with 16, 24 and 34 entries a row, in us: finding groups
18, 20 and 24, with marking of rows that overflow, which takes 2.5 alone; placing tokens 9. Without
sides 16, 18 and 22, and 5; with scores in bfloat16, two neurons at a time, and groups in 32 bits
30, 32 and 41, and 12. Sides counted one after the other, without a list: placing 37 to 39.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
from twell_numba.kernels.twell.cuda_language import (
    ballot,
    prefix_of_block,
    prefix_of_warp,
    set_bit,
)

_i32 = ir.IntType(32)

GROUPS = 128
SIDES = 8
HIGHEST_SCORE = 127
THREADS = 256
# Neurons of a token by which it is grouped, at most: any more change little. So many times the
# highest score is less than 2^15.
MOST_FIRING = 256
LISTED = MOST_FIRING * THREADS // 32
PLACING_THREADS = 1024
MOST_LISTED = 8192  # tokens of a group that are placed by side


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


class Sharing(NamedTuple):
    """What a batch says of letting blocks of tokens share neurons.

    Attributes
    ----------
    learned : LearnedPattern or None
        By which that is faster than gathering each token's; None if it is not.
    densest : float
        Fraction of neurons firing up to which the layer's forward pass is then reckoned to be
        faster than the dense one, if what fires becomes more or less in proportion.
    """

    learned: LearnedPattern | None = None
    densest: float = 0.0


def order_tokens(packed: DeviceActivations, learned: LearnedPattern) -> DeviceArray:
    """Return the tokens by group and side; nothing waits.

    Rows of which a tile overflows, as far as they are not marked yet, become rows of the tail.

    Returns
    -------
    DeviceArray of int32, shape (M,)
    """
    rows, stream = packed.shape[0], packed.values.stream
    groups = room_for_groups(packed)
    order = empty(rows, np.int32, stream)
    find_groups(packed, learned.scores, groups)
    place_tokens(GROUPS, *groups, order, rows)
    return order


def room_for_groups(packed: DeviceActivations) -> tuple[DeviceArray, DeviceArray]:
    """Return arrays of uint8 for each token's group, which is read by 16 bytes, and side."""
    size, stream = -(-packed.shape[0] // 16) * 16, packed.values.stream
    return empty(size, np.uint8, stream), empty(size, np.uint8, stream)


def find_groups(
    packed: DeviceActivations, scores: DeviceArray, groups: tuple[DeviceArray, DeviceArray]
) -> None:
    """Write each token's group and side, and mark the rows of which a tile overflows."""
    rows = packed.shape[0]
    group_tokens(
        group_tokens.blocks_of_warps(rows), packed.columns, packed.counts, packed.overflows, scores,
        *groups, rows, packed.tile, packed.tiles, packed.slots,
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
def sum_of_one(first, second, distance):
    """Return the sum over two lanes of their first word, or, for the upper one, of the second."""
    upper = cuda.threadIdx.x & distance != 0
    own = second if upper else first
    others = first if upper else second
    return types.int32(own + cuda.shfl_xor_sync(FULL_WARP, others, distance))


@device_function
def best_of_word(best, word, group):
    """Return the highest of scores with their groups, two more of them in a word."""
    # of two alike the lower group
    low = types.int32((word & 0xFFFF) << 7 | (GROUPS - 1 - group))
    high = types.int32((word >> 16) << 7 | (GROUPS - 3 - group))
    return max(best, max(low, high))


@device_function
def score_of(first, second, group, wanted):
    """Return the score of a group, of four from ``group`` on that a lane has; 0 if it has not."""
    score = types.int32(0)
    if wanted >= group and wanted < group + 4:
        in_words = types.int32(wanted - group)
        word = second if in_words & 1 == 1 else first
        score = types.int32(word >> 16 if in_words & 2 == 2 else word & 0xFFFF)
    return score


@device_function
def side_of(score, difference):
    """Return how much nearer a token is to the next group than to the one before, up to 7."""
    side = types.int32(0)
    if score > 0:
        above = types.int32(SIDES * difference + SIDES // 2 * score)
        side = min(types.int32(max(above, types.int32(0)) // score), types.int32(SIDES - 1))
    return side


@device_function
def empty_full_row(counts, overflows, row, tiles, slots):
    """Mark a row of which a tile overflows, and set its counts to 0; a warp does."""
    lane = types.int32(cuda.threadIdx.x % 32)
    is_full = 0
    t = lane
    while t < tiles:
        if load(counts, row * tiles + t) > slots:
            is_full = 1
        t = types.int32(t + 32)
    if ballot(is_full) != 0:
        t = lane
        while t < tiles:
            store(counts, row * tiles + t, 0)
            t = types.int32(t + 32)
        if lane == 0:
            set_bit(overflows, row // 32, row % 32)
        cuda.syncwarp()


@kernel(threads=THREADS)
def group_tokens(
    columns, counts, overflows, scores, group_of, sides, rows, tile, tiles, slots
):  # fmt: skip
    """Find each token's group; a warp takes a token, a quarter of it every fourth neuron."""
    listed = cuda.shared.array(LISTED, types.int32)
    start = types.int32(cuda.threadIdx.x // 32 * MOST_FIRING)
    quarter = types.int32(cuda.threadIdx.x % 32 // 8)
    own = types.int32(cuda.threadIdx.x % 8 * 16)
    row = global_thread() // 32
    while row < rows:
        empty_full_row(counts, overflows, row, tiles, slots)
        firing = list_firing(listed, columns, counts, row, tile, tiles, slots)
        zero = types.int32(0)
        sums = (zero, zero, zero, zero, zero, zero, zero, zero)
        e = quarter
        while e < firing:
            sums = add_scores(sums, scores, listed[start + e], own)
            e = types.int32(e + 4)
        # a lane has four groups' scores, of all quarters
        a, b = sum_of_one(sums[0], sums[4], 16), sum_of_one(sums[1], sums[5], 16)
        c, d = sum_of_one(sums[2], sums[6], 16), sum_of_one(sums[3], sums[7], 16)
        first, second = sum_of_one(a, c, 8), sum_of_one(b, d, 8)
        group = types.int32(own + 4 * quarter)
        best = best_of_word(types.int32(0), first, group)
        best = best_of_word(best, second, types.int32(group + 1))
        for step in range(5):
            best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 16 >> step))
        found = types.int32(GROUPS - 1 - (best & (GROUPS - 1)))
        difference = types.int32(
            score_of(first, second, group, types.int32(found + 1))
            - score_of(first, second, group, types.int32(found - 1))
        )
        for step in range(5):
            other = cuda.shfl_xor_sync(FULL_WARP, difference, 16 >> step)
            difference = types.int32(difference + other)
        if cuda.threadIdx.x % 32 == 0:
            store(group_of, row, found)
            store(sides, row, side_of(types.int32(best >> 7), difference))
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


@device_function
def place_by_side(listed, count, start, order, parts):
    """Write tokens to the order by side; ``listed`` has eight times each, and its side."""
    most = types.int32((count + cuda.blockDim.x - 1) // cuda.blockDim.x)
    first = min(types.int32(cuda.threadIdx.x * most), count)
    end = min(types.int32(first + most), count)
    places = cuda.local.array(SIDES, types.int32)
    for pair in range(SIDES // 2):
        # how many are of one side, and in the upper half of the same word of the next
        own = types.int32(0)
        for i in range(first, end):
            side = types.int32(listed[i] & (SIDES - 1))
            if side >> 1 == pair:
                own = types.int32(own + (types.int32(1) << (16 * (side & 1))))
        before, total = prefix_of_block(own, parts)
        of_first = types.int32(total & 0xFFFF)
        places[2 * pair] = types.int32(start + (before & 0xFFFF))
        places[2 * pair + 1] = types.int32(start + of_first + (before >> 16))
        start = types.int32(start + of_first + (total >> 16))
    for i in range(first, end):
        code = listed[i]
        side = types.int32(code & (SIDES - 1))
        store(order, places[side], types.int32(code // SIDES))
        places[side] = types.int32(places[side] + 1)


@kernel(threads=PLACING_THREADS)
def place_tokens(group_of, sides, order, rows):
    """Write a group's tokens to the order; a block each, whose threads have rows side by side."""
    listed = cuda.shared.array(MOST_LISTED, types.int32)
    parts = cuda.shared.array(66, types.int32)
    group = types.int32(cuda.blockIdx.x)
    most = ((rows + 15) // 16 + cuda.blockDim.x - 1) // cuda.blockDim.x * 16
    first = min(types.int64(cuda.threadIdx.x) * most, rows)
    end = min(first + most, rows)
    earlier, own = compare_groups(group_of, first, end, group)
    _, start = prefix_of_block(earlier, parts)
    before, count = prefix_of_block(own, parts)
    # of too many tokens sides are not looked at
    has_room = count <= MOST_LISTED
    place = before
    if own > 0:
        for m in range(first, end):
            if types.int32(load(group_of, m)) == group:
                if has_room:
                    listed[place] = types.int32(m * SIDES + types.int32(load(sides, m)))
                else:
                    store(order, start + place, m)
                place = types.int32(place + 1)
    if has_room:
        cuda.syncthreads()
        place_by_side(listed, count, start, order, parts)
