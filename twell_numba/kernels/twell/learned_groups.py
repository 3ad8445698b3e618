"""Learning to tell tokens apart by which neurons fire for them: k-means, on a GPU.

A token is the vector with sqrt(r_j) for each neuron j that fires for it, and a group's mean the sum
of its tokens, scaled to length 1; a token belongs to the group with which its product is largest:

    r_j = log((M + 1) / (tokens for which j fires + 1))
    scores[j, k] = r_j n_jk / sqrt(sum of r_i n_ik^2 over i)

with n_jk the tokens of group k for which j fires. No score is more than sqrt(log(M + 1)): that many
are 127 where they are kept, as integers. Of 128 groups, which begin with a token each, as far
apart as they can be, and are improved UPDATES times. Groups are then numbered so that each is
followed by the one, of those left, whose scores are most like its own: a block of tokens that has
some of both then needs few neurons more.

Counts are integers, sums in a fixed order: the same groups in every run. On the patterns of two
trained models, 16384 tokens, these are the neurons of a block of 128 tokens, in the order of the
text, after 1, 2, 4 and 8 updates, without sides (see :mod:`token_groups`); without the numbering;
and of the second half of the tokens, with groups learned from the first by 8 updates, beside their
own:

| | entries | text | 1 | 2 | 4 | 8 | not numbered | first half's, own |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 3e-4, layer 1 | 2033 | 801 | 317 | 306 | 300 | 298 | 333 | 328, 321 |
| 3e-4, layer 4 | 3011 | 1230 | 843 | 806 | 791 | 769 | 829 | 859, 819 |
| 3e-4, layer 7 | 4311 | 1123 | 764 | 742 | 733 | 725 | 774 | 869, 825 |
| 1e-4, layer 4 | 7589 | 2101 | 1418 | 1369 | 1336 | 1317 | 1450 | 1455, 1401 |
| 1e-4, layer 7 | 10536 | 1993 | 1451 | 1410 | 1386 | 1365 | 1483 | 1587, 1553 |

Twice as many groups need 2% to 5% fewer neurons; other weights of neurons (r_j, 1, logarithms of
how much likelier a neuron fires in a group) 0% to 9% more; scores that are not rounded, up to 1%
more or fewer.
"""

import math

import numpy as np

from twell_numba.device.gpu import empty, kernel
from twell_numba.device.gpu.gemm import matmul
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
from twell_numba.kernels.twell.cuda_activations import DeviceActivations
from twell_numba.kernels.twell.entry_transpose import NeuronLists
from twell_numba.kernels.twell.token_groups import (
    GROUPS,
    HIGHEST_SCORE,
    LearnedPattern,
    find_groups,
    room_for_groups,
)

UPDATES = 4
# Blocks among which neurons are divided where sums over all of them are wanted.
PARTS = 64
WARPS = GROUPS // 32


def learn_pattern(packed: DeviceActivations, lists: NeuronLists) -> LearnedPattern:
    """Learn groups of tokens from those of a batch; nothing waits, some things are compiled.

    Parameters
    ----------
    packed : DeviceActivations
    lists : NeuronLists
        Its entries by neuron.
    """
    (rows, neurons), stream = packed.shape, packed.values.stream
    group_of, sides = room_for_groups(packed)
    counts = empty((neurons, GROUPS), np.int32, stream)
    squares = empty((PARTS, GROUPS), np.float32, stream)
    numbers = empty(GROUPS, np.int32, stream)
    scores = empty((neurons, GROUPS), np.uint8, stream)
    exact = empty((neurons, GROUPS), packed.values.dtype, stream)
    seed_groups(seed_groups.blocks(max(rows, GROUPS)), group_of, numbers, rows)
    of_groups = (counts, lists.neuron_starts, squares, numbers, scores, exact, rows, neurons)
    for update in range(UPDATES):
        if update:
            find_groups(packed, scores, (group_of, sides))
        count_by_group(neurons, lists.neuron_starts, lists.rows, group_of, counts)
        add_squares(PARTS, counts, lists.neuron_starts, squares, rows, neurons)
        score_neurons(score_neurons.blocks(neurons * GROUPS), *of_groups)
    number_groups(1, matmul(exact, exact, transpose_a=True), numbers)
    score_neurons(score_neurons.blocks(neurons * GROUPS), *of_groups)
    return LearnedPattern(scores)


@kernel()
def seed_groups(group_of, numbers, rows):
    """Put one token into each group, others into none (128), and number the groups as they are."""
    m = global_thread()
    if m < GROUPS:
        store(numbers, m, m)
    while m < rows:
        group = m * GROUPS // rows
        is_seed = m == (2 * group + 1) * rows // (2 * GROUPS)
        store(group_of, m, group if is_seed else types.int64(GROUPS))
        m += grid_threads()


@kernel(threads=GROUPS)
def count_by_group(neuron_starts, list_rows, group_of, counts):
    """Count the tokens of each group for which a neuron fires; a block each, a thread a group."""
    staged = cuda.shared.array(GROUPS, types.int32)
    neuron = types.int64(cuda.blockIdx.x)
    thread = types.int32(cuda.threadIdx.x)
    entry = types.int64(load(neuron_starts, neuron))
    end = types.int64(load(neuron_starts, neuron + 1))
    count = types.int32(0)
    while entry < end:
        here = types.int32(min(types.int64(GROUPS), end - entry))
        if thread < here:
            token = types.int64(load(list_rows, entry + thread))
            staged[thread] = types.int32(load(group_of, token))
        cuda.syncthreads()
        for i in range(here):
            count = types.int32(count + (1 if staged[i] == thread else 0))
        cuda.syncthreads()
        entry += GROUPS
    store(counts, neuron * GROUPS + thread, count)


@device_function
def rarity(neuron_starts, neuron, rows):
    """Return the logarithm of one in how many tokens a neuron fires for."""
    firing = load(neuron_starts, neuron + 1) - load(neuron_starts, neuron)
    return types.float32(math.log(types.float64(rows + 1) / types.float64(firing + 1)))


@kernel(threads=GROUPS)
def add_squares(counts, neuron_starts, squares, rows, neurons):
    """Add up the squares of a share of the neurons, for each group."""
    part, group = types.int64(cuda.blockIdx.x), types.int64(cuda.threadIdx.x)
    total = types.float32(0)
    for neuron in range(part * neurons // PARTS, (part + 1) * neurons // PARTS):
        count = types.float32(load(counts, neuron * GROUPS + group))
        total += rarity(neuron_starts, neuron, rows) * count * count
    store(squares, part * GROUPS + group, total)


@kernel()
def score_neurons(counts, neuron_starts, squares, numbers, scores, exact, rows, neurons):
    """Write the scores as they are, and as integers with the groups numbered anew."""
    i = global_thread()
    while i < neurons * GROUPS:
        neuron, group = i // GROUPS, i % GROUPS
        total = types.float32(0)
        for part in range(PARTS):
            total += load(squares, part * GROUPS + group)
        score = types.float32(0)
        if total > 0:
            count = types.float32(load(counts, i))
            score = types.float32(rarity(neuron_starts, neuron, rows) * count / math.sqrt(total))
        store(exact, i, score)
        scale = HIGHEST_SCORE / math.sqrt(math.log(types.float64(rows + 1)))
        rounded = min(types.int32(score * scale + 0.5), types.int32(HIGHEST_SCORE))
        store(scores, neuron * GROUPS + load(numbers, group), rounded)
        i += grid_threads()


@device_function
def best_of(score, group, other_score, other_group):
    """Return the higher of two scores and its group, the lower one of two alike."""
    if other_score > score or (other_score == score and other_group < group):
        score, group = other_score, other_group
    return score, group


@kernel(threads=GROUPS)
def number_groups(products, numbers):
    """Number the groups so that like ones follow each other; for one block, a thread a group."""
    best_scores = cuda.shared.array(WARPS, types.float32)
    best_groups = cuda.shared.array(WARPS, types.int32)
    group = types.int32(cuda.threadIdx.x)
    number = types.int32(0 if group == 0 else -1)
    last = types.int64(0)
    for n in range(1, GROUPS):
        score = types.float32(-1)
        if number < 0:
            score = load(products, last * GROUPS + group)
        best = group
        for step in range(5):
            other = cuda.shfl_xor_sync(FULL_WARP, score, 16 >> step)
            other_group = cuda.shfl_xor_sync(FULL_WARP, best, 16 >> step)
            score, best = best_of(score, best, other, other_group)
        if group % 32 == 0:
            best_scores[group // 32] = score
            best_groups[group // 32] = best
        cuda.syncthreads()
        score, best = best_scores[0], best_groups[0]
        for warp in range(1, WARPS):
            score, best = best_of(score, best, best_scores[warp], best_groups[warp])
        last = types.int64(best)
        if group == best:
            number = types.int32(n)
        cuda.syncthreads()  # the next best ones go to the same place
    store(numbers, group, number)
