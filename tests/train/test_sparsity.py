"""The L1 term's scale, statistics over a step, dead neurons and their revival."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from twell_numba.train.sparsity import DeadNeurons, StepStatistics, l1_scale, revive_dead


def test_l1_scale_is_the_mean_over_layers_and_tokens_of_the_sum_over_neurons(rng):
    h = rng.standard_normal((3, 10, 7))
    strength = 0.3
    term = strength * np.abs(h).sum(axis=2).mean(axis=1).mean(axis=0)
    assert l1_scale(strength, layers=3, tokens=10) * np.abs(h).sum() == pytest.approx(term)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def statistics_of(h):
    return [
        SimpleNamespace(
            tokens=len(layer),
            neurons=layer.shape[1],
            nonzeros=int(np.count_nonzero(layer)),
            absolute_sum=float(np.abs(layer).sum()),
            fired=(layer != 0).any(axis=0),
            path="dense",
        )
        for layer in h
    ]


def test_statistics_do_not_depend_on_how_a_step_is_parted(rng):
    h = np.maximum(rng.standard_normal((2, 12, 5)), 0)
    h[:, :, 2] = 0
    whole, parts = StepStatistics(2, 5), StepStatistics(2, 5)
    whole.add(statistics_of(h))
    for start in range(0, 12, 3):
        parts.add(statistics_of(h[:, start : start + 3]))
    assert parts.tokens == 12
    assert parts.nonzeros_per_token() == whole.nonzeros_per_token()
    assert parts.activation_sparsity() == pytest.approx(np.mean(h == 0))
    np.testing.assert_allclose(parts.absolute_sum, np.abs(h).sum(axis=(1, 2)))
    np.testing.assert_array_equal(parts.fired, (h != 0).any(axis=1))
    assert whole.paths == ["dense", "dense"]


def test_a_neuron_is_dead_after_a_window_without_firing():
    counts = DeadNeurons(1, 3, window=2)
    for fired in ([1, 0, 0], [0, 1, 0]):
        counts.add_step(np.array([fired], bool))
    np.testing.assert_array_equal(counts.dead(), [[False, False, True]])
    assert counts.window_is_full()
    counts.add_step(np.array([[0, 0, 0]], bool))
    np.testing.assert_array_equal(counts.dead(), [[True, False, True]])
    assert counts.fraction() == pytest.approx(2 / 3)
    counts.add_step(np.array([[1, 1, 1]], bool))
    assert not counts.dead().any()


def test_before_a_window_is_full_only_neurons_that_never_fired_are_dead():
    counts = DeadNeurons(1, 2, window=100)
    counts.add_step(np.array([[1, 0]], bool))
    counts.add_step(np.array([[0, 0]], bool))
    np.testing.assert_array_equal(counts.dead(), [[False, True]])
    assert not counts.window_is_full()


def test_counts_survive_json(rng):
    whole, resumed = DeadNeurons(2, 4, window=3), DeadNeurons(2, 4, window=3)
    for _ in range(5):
        whole.add_step(rng.random((2, 4)) < 0.2)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    fired = rng.random((2, 4)) < 0.2
    whole.add_step(fired)
    resumed.add_step(fired)
    np.testing.assert_array_equal(resumed.dead(), whole.dead())
    with pytest.raises(ValueError, match="counts of shape"):
        DeadNeurons(1, 4, window=3).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    "state",
    [
        {"step": 2.0, "last_fired": [[1, 2]]},
        {"step": True, "last_fired": [[1, 1]]},
        {"step": -1, "last_fired": [[0, 0]]},
        {"step": 2, "last_fired": [[1, 2.5]]},
        {"step": 2, "last_fired": [[1, 3]]},
        {"step": 2, "last_fired": [[1, -1]]},
        {"step": 2, "last_fired": [[1, 2**70]]},
        {"step": 2, "last_fired": [["1", "2"]]},
        {"step": 2, "last_fired": [[1, 2], [1]]},
    ],
)
def test_counts_that_cannot_be_are_refused(state):
    with pytest.raises(ValueError, match=r"counts of|fired in no step|inhomogeneous"):
        DeadNeurons(1, 2, window=3).load_state_dict(state)


def test_revival_touches_dead_rows_and_their_moments_only(rng):
    """Fault 77: what the optimizer knows of living neurons must stay."""
    gate, first, second = (rng.standard_normal((6, 4)).astype(np.float32) for _ in range(3))
    before = [array.copy() for array in (gate, first, second)]
    dead = np.array([0, 1, 0, 0, 1, 0], bool)
    revive_dead(gate, first, second, dead, rng)
    for array, old in zip((gate, first, second), before, strict=True):
        np.testing.assert_array_equal(array[~dead], old[~dead])
    assert (first[dead] == 0).all()
    assert (second[dead] == 0).all()
    assert (gate[dead] != before[0][dead]).all()


def test_revival_keeps_nine_tenths_and_adds_a_tenth_of_the_initial_noise(rng):
    gate = np.full((200, 100), 0.5, np.float32)
    moments = np.ones_like(gate), np.ones_like(gate)
    revive_dead(gate, *moments, np.ones(200, bool), rng)
    assert gate.mean() == pytest.approx(0.45, abs=1e-4)
    assert gate.std() == pytest.approx(0.1 * 0.02, rel=0.02)


def test_revival_of_nothing_changes_nothing(rng):
    gate = np.ones((3, 2), np.float32)
    revive_dead(gate, gate.copy(), gate.copy(), np.zeros(3, bool), rng)
    assert (gate == 1).all()
