"""Which tokens make up a block together, on a GPU: those for which the same neurons fire.

    group(m) = argmax_k sum of scores[j, k] over the neurons j that fire for token m
    order    = the tokens by group, ascending in each

A block of tokens needs the weights of all neurons that fire for any of them. In text, 128 tokens
that follow each other need each of their neurons for 2 to 5 of them; 128 tokens of one group, for 4
to 8, with scores from :mod:`learned_groups`. The same order in every run.

A warp takes a token: it lists its neurons in shared memory, then adds up their rows of scores, 256
bytes each, of two neurons at a time. Bound by the latency of few dependent steps. Then a block
takes a group and counts, in all tokens, those of groups before it and its own.
"""

from dataclasses import dataclass

import numpy as np

from twell_numba.device.gpu import DeviceArray, empty, kernel
from twell_numba.device.gpu.language import (
    FULL_WARP,
    cuda,
    device_function,
    global_thread,
    grid_threads,
    load,
    store,
    types,
)
from twell_numba.kernels.cuda_vectors import add_scaled, eight_zeros, load_eight
from twell_numba.kernels.twell.cuda_activations import DeviceActivations, HotNeurons
from twell_numba.kernels.twell.cuda_language import prefix_of_block, prefix_of_warp

GROUPS = 128
THREADS = 256
# Neurons of a token by which it is grouped, at most: any more change little.
MOST_FIRING = 256
LISTED = MOST_FIRING * THREADS // 32
PLACING_THREADS = 1024


@dataclass(frozen=True, eq=False)
class LearnedPattern:
    """How tokens are told apart by which neurons fire for them.

    Attributes
    ----------
    scores : DeviceArray, shape (F, 128)
        How much a neuron that fires speaks for each group. Groups with neurons in common stand side
        by side. Never changed.
    hot : HotNeurons or None
        Neurons whose weight gradients are dense products, where that is faster; None if none are.
    """

    scores: DeviceArray
    hot: HotNeurons | None = None


def order_tokens(packed: DeviceActivations, groups: LearnedPattern) -> DeviceArray:
    """Return the tokens by group, ascending in each; nothing waits.

    Returns
    -------
    DeviceArray of int32, shape (M,)
    """
    rows, stream = packed.shape[0], packed.values.stream
    group_of = empty(rows, np.int32, stream)
    order = empty(rows, np.int32, stream)
    find_groups(packed, groups.scores, group_of)
    place_tokens(GROUPS, group_of, order, rows)
    return order


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


@device_function
def best_of(score, group, other_score, other_group):
    """Return the higher of two scores and its group, the lower one of two alike."""
    if other_score > score or (other_score == score and other_group < group):
        score, group = other_score, other_group
    return score, group


@kernel(threads=THREADS)
def group_tokens(columns, counts, scores, group_of, rows, tile, tiles, slots):
    """Find each token's group; a warp takes a token, half of it every other neuron."""
    listed = cuda.shared.array(LISTED, types.int32)
    start = types.int32(cuda.threadIdx.x // 32 * MOST_FIRING)
    half = types.int32(cuda.threadIdx.x % 32 // 16)
    own = types.int64(cuda.threadIdx.x % 16 * 8)
    row = global_thread() // 32
    while row < rows:
        firing = list_firing(listed, columns, counts, row, tile, tiles, slots)
        sums = eight_zeros(scores)
        e = half
        while e < firing:
            later = types.int32(e + 2)
            first = types.int64(listed[start + e]) * GROUPS
            second = types.int64(listed[start + min(later, types.int32(firing - 1))]) * GROUPS
            numbers = load_eight(scores, first, own, GROUPS, 1)
            more = load_eight(scores, second, own, GROUPS, 1)
            sums = add_scaled(sums, types.float32(1), numbers)
            sums = add_scaled(sums, types.float32(1 if later < firing else 0), more)
            e = types.int32(e + 4)
        score = types.float32(-1)
        group = types.int32(0)
        for i in range(8):
            total = sums[i] + cuda.shfl_xor_sync(FULL_WARP, sums[i], 16)
            score, group = best_of(score, group, total, types.int32(own + i))
        for step in range(4):
            other = cuda.shfl_xor_sync(FULL_WARP, score, 8 >> step)
            other_group = cuda.shfl_xor_sync(FULL_WARP, group, 8 >> step)
            score, group = best_of(score, group, other, other_group)
        if cuda.threadIdx.x % 32 == 0:
            store(group_of, row, group)
        cuda.syncwarp()  # the next row's neurons go to the same place
        row += grid_threads() // 32


@device_function
def compare_groups(group_of, first, end, group):
    """Return how many of some tokens are of groups before one, and of it."""
    earlier = types.int32(0)
    own = types.int32(0)
    m = first
    while m < end:
        last = end - 1
        for i in range(4):
            found = load(group_of, min(m + i, last))
            is_there = m + i < end
            earlier = types.int32(earlier + (1 if is_there and found < group else 0))
            own = types.int32(own + (1 if is_there and found == group else 0))
        m += 4
    return earlier, own


@kernel(threads=PLACING_THREADS)
def place_tokens(group_of, order, rows):
    """Write a group's tokens to the order; a block each, whose threads have rows side by side."""
    parts = cuda.shared.array(66, types.int32)
    group = types.int32(cuda.blockIdx.x)
    most = (rows + cuda.blockDim.x - 1) // cuda.blockDim.x
    first = min(types.int64(cuda.threadIdx.x) * most, rows)
    end = min(first + most, rows)
    earlier, own = compare_groups(group_of, first, end, group)
    _, start = prefix_of_block(earlier, parts)
    before, _ = prefix_of_block(own, parts)
    place = types.int32(start + before)
    for m in range(first, end):
        if load(group_of, m) == group:
            store(order, place, m)
            place = types.int32(place + 1)
