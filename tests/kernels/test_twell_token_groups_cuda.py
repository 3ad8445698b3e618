"""Groups of tokens for which the same neurons fire, on a GPU, against NumPy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.twell import cuda, learned_groups, token_groups  # noqa: E402
from twell_numba.kernels.twell.entry_transpose import list_by_neuron  # noqa: E402
from twell_numba.kernels.twell.token_groups import GROUPS, LearnedPattern, order_tokens  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# M, F, tile, slots, largest fraction that fires
SMALL = [(1, 9, 4, 4, 0.5), (70, 600, 256, 200, 0.3), (37, 40, 1, 1, 0.4)]
LARGE = [(5000, 5632, 256, 32, 0.02), (131_072, 700, 256, 32, 0.05), (3000, 20_000, 256, 200, 0.1)]


def make_pattern(rng, problem):
    """Return which neurons fire, for each token a number of its own of them."""
    rows, neurons, _, _, most = problem
    fires = rng.random((rows, neurons), np.float32) < rng.random((rows, 1), np.float32) * most
    fires[rows // 2] = False  # of no use in telling it apart
    return fires


def pack(machine, fires, tile, slots):
    gate = np.where(fires, BFLOAT16.type(1), BFLOAT16.type(-1))
    return cuda.relu_pack(machine.upload(gate), tile, slots)


def learn(packed):
    return learned_groups.learn_pattern(packed, list_by_neuron(packed)[0])


def stored_of(packed, fires):
    """Return the pattern without rows of which a tile overflows."""
    stored = fires.copy()
    stored[packed.tail_rows.to_numpy()[: packed.tail_count.to_numpy()[0]]] = False
    return stored


def wanted_scores(stored, scores):
    """Return each token's scores, by its first 256 neurons."""
    first = stored & (np.cumsum(stored, axis=1) <= token_groups.MOST_FIRING)
    return first.astype(np.float32) @ scores.astype(np.float32)


def wanted_groups(stored, scores):
    return wanted_scores(stored, scores).argmax(axis=1)


def wanted_sides(stored, scores):
    """Return on which side of its group a token is."""
    found = np.pad(wanted_scores(stored, scores), ((0, 0), (1, 1)))
    group, token = found[:, 1:-1].argmax(axis=1), np.arange(len(found))
    score = found[token, group + 1]
    nearer = 8 * (found[token, group + 2] - found[token, group]) / np.where(score, score, 1)
    return np.where(score, np.clip(np.floor(nearer + 4), 0, 7), 0)


def test_tokens_are_ordered_by_group(rng, machine):
    for problem in machine.shapes(SMALL, LARGE):
        fires = make_pattern(rng, problem)
        packed = pack(machine, fires, *problem[2:4])
        scores = rng.integers(0, 128, (problem[1], GROUPS)).astype(np.uint8)
        order = order_tokens(packed, LearnedPattern(machine.upload(scores))).to_numpy()
        stored = stored_of(packed, fires)
        sides, groups = wanted_sides(stored, scores), wanted_groups(stored, scores)
        assert len(set(sides)) > 1 or len(sides) == 1
        np.testing.assert_array_equal(order, np.lexsort((sides, groups)))


def check_sides(rng, machine, rows, most):
    """Order tokens of which most are of one group, of several sides."""
    fires = rng.random((rows, 9)) < 0.7
    fires[10:20] = False  # of group 0
    scores = np.zeros((9, GROUPS), np.uint8)
    scores[:, 5] = 100
    scores[:, 6] = rng.integers(0, 100, 9)
    groups, sides = wanted_groups(fires, scores), wanted_sides(fires, scores)
    assert len(set(sides[groups == 5])) > 1
    wanted = np.lexsort((sides, groups))
    if np.count_nonzero(groups == 5) > most:
        wanted = np.argsort(groups, kind="stable")
    packed = pack(machine, fires, 256, 9)
    order = order_tokens(packed, LearnedPattern(machine.upload(scores))).to_numpy()
    np.testing.assert_array_equal(order, wanted)


def test_tokens_of_a_group_are_ordered_by_side(rng, machine):
    check_sides(rng, machine, 70, token_groups.MOST_LISTED)
    if machine.is_real:
        check_sides(rng, machine, 8000, token_groups.MOST_LISTED)


def test_of_too_many_tokens_sides_are_not_looked_at(rng, machine, monkeypatch):
    if not machine.is_real:  # which would not notice in a process that has the kernel already
        monkeypatch.setattr(token_groups, "MOST_LISTED", 32)
    check_sides(rng, machine, machine.shapes([70], [9000])[-1], token_groups.MOST_LISTED)


def test_a_row_that_overflows_is_emptied(rng, machine):
    fires = rng.random((70, 40)) < 0.4
    packed = pack(machine, fires, 8, 8)
    counts = packed.counts.to_numpy()
    is_full = np.isin(np.arange(70), (3, 64, 69))
    counts[is_full, rng.integers(0, 5, 3)] = 9
    packed.counts.copy_from(counts)
    scores = rng.integers(0, 128, (40, GROUPS)).astype(np.uint8)
    order_tokens(packed, LearnedPattern(machine.upload(scores)))
    np.testing.assert_array_equal(packed.counts.to_numpy(), np.where(is_full[:, None], 0, counts))
    marked = np.unpackbits(packed.overflows.to_numpy().view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(marked[:70], is_full)


def learned_in_numpy(stored, updates):
    """Return the scores that k-means arrives at, before they are rounded and groups numbered."""
    rows = len(stored)
    k = np.arange(rows) * GROUPS // rows
    group_of = np.where(np.arange(rows) == (2 * k + 1) * rows // (2 * GROUPS), k, -1)
    rarity = np.log((rows + 1) / (stored.sum(axis=0) + 1))
    exact = np.zeros((stored.shape[1], GROUPS))
    for update in range(updates):
        if update:
            group_of = wanted_groups(stored, as_kept(exact, rows))
        counts = np.stack([stored[group_of == k].sum(axis=0) for k in range(GROUPS)])
        norms = np.sqrt((rarity * counts.astype(np.float64) ** 2).sum(axis=1))
        exact = (rarity * counts / np.where(norms, norms, 1)[:, None]).T
    return exact


def as_kept(exact, rows):
    """Return scores as integers."""
    return np.minimum(np.floor(exact * 127 / np.sqrt(np.log(rows + 1)) + 0.5), 127)


def numbered_in_numpy(exact):
    """Return the groups, each followed by what is most like it of those left."""
    scores = exact.astype(BFLOAT16)
    products = scores.astype(np.float32).T @ scores.astype(np.float32)
    products = products.astype(BFLOAT16).astype(np.float32)
    chain, left = [0], list(range(1, GROUPS))
    while left:
        best = left[int(np.argmax(products[chain[-1], left]))]
        chain.append(best)
        left.remove(best)
    return chain


@pytest.mark.parametrize("updates", [1, 2])
def test_groups_are_what_k_means_finds(machine, monkeypatch, updates):
    rng = np.random.default_rng(updates)
    monkeypatch.setattr(learned_groups, "UPDATES", updates)
    fires = make_pattern(rng, (200, 90, 256, 90, 0.3))
    packed = pack(machine, fires, 256, 90)
    groups = learn(packed)
    exact = learned_in_numpy(fires, updates)
    wanted = as_kept(exact, len(fires))[:, numbered_in_numpy(exact)]
    np.testing.assert_array_equal(groups.scores.to_numpy(), wanted)


def test_alike_tokens_come_together(machine):
    rng = np.random.default_rng(0)
    rows, neurons, kinds = (4096, 300, 5) if machine.is_real else (256, 60, 5)
    of_kind = rng.random((kinds, neurons)) < 0.2
    kind_of = rng.integers(0, kinds, rows)
    fires = of_kind[kind_of] ^ (rng.random((rows, neurons)) < 0.01)
    packed = pack(machine, fires, 256, 64)
    groups = learn(packed)
    order = order_tokens(packed, groups).to_numpy()
    np.testing.assert_array_equal(np.sort(order), np.arange(rows))
    changes = np.count_nonzero(np.diff(kind_of[order]))
    assert changes < rows / 16, "of about 4 rows / 5 before"
    again = learn(packed)
    np.testing.assert_array_equal(again.scores.to_numpy(), groups.scores.to_numpy())
