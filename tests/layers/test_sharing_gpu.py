"""When feedforward layers on a GPU let blocks of tokens share neurons."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.kernels.twell import cuda, shared_lists  # noqa: E402
from twell_numba.kernels.twell.token_groups import Sharing  # noqa: E402
from twell_numba.layers import GatedFFN, TwoMatrixFFN, ffn  # noqa: E402

# What no kernel here looks into.
LEARNED = SimpleNamespace(hot=None)


@pytest.fixture
def layer_calls(monkeypatch):
    """Measure often, with answers made up; return those, and whether calls were to share."""
    answers, calls = [], []
    original = cuda.forward_packed

    def note(x, up_weight, down_weight, packed):
        calls.append(packed.token_order is not None)
        packed.token_order = None  # which this GPU cannot
        return original(x, up_weight, down_weight, packed)

    monkeypatch.setattr(ffn, "FEWEST_SHARING", 35)
    monkeypatch.setattr(ffn, "TOKENS_A_MEASUREMENT_OF_SHARING", 100)
    monkeypatch.setattr(ffn, "CALLS_A_MEASUREMENT_OF_SHARING", 2)
    monkeypatch.setattr(ffn, "GPU_AUTO_SIZE", 1)
    monkeypatch.setattr(cuda, "can_share", lambda weight, tokens: True)
    monkeypatch.setattr(cuda, "learn_to_share", lambda activations, width, learned: answers.pop(0))
    monkeypatch.setattr(cuda, "order_tokens", lambda activations, learned: learned)
    monkeypatch.setattr(cuda.shared_neurons, "fits", lambda *arguments: True)
    monkeypatch.setattr(cuda, "forward_packed", note)
    return answers, calls


def make_call(rng, machine, kind, path):
    weights = rng.standard_normal((3, 40, 32)).astype(np.float32)[: 3 if kind is GatedFFN else 2]
    layer = kind("mlp", *weights, path)
    for parameter in layer.parameters():
        parameter.move_to_gpu(machine.gpu.stream, np.float32)

    def call(tokens):
        x = machine.upload(rng.standard_normal((tokens, 32)).astype(np.float32))
        y, backprop = layer(x)
        backprop(y)

    return layer, call


def test_sharing_is_measured_now_and_then(rng, machine, layer_calls):
    answers, calls = layer_calls
    layer, call = make_call(rng, machine, GatedFFN, "twell")
    answers += [Sharing(LEARNED, 0.3), Sharing()]
    call(34)  # too few tokens to measure
    assert layer.auto_state == ffn.AutoState()
    for _ in range(5):
        call(40)
    assert calls == [False, False, True, True, True, False]
    assert answers == []
    assert layer.auto_state == ffn.AutoState(learned=None, sharing_tokens=40)
    assert not layer.measures_sharing(40)
    layer.count_sharing_tokens(40)  # of a replay
    assert not layer.measures_sharing(40)
    layer.count_sharing_tokens(40)
    assert layer.measures_sharing(40)
    assert not layer.measures_sharing(34)


def test_auto_measures_sharing_on_the_path_that_shares(rng, machine, layer_calls):
    answers, calls = layer_calls
    layer, call = make_call(rng, machine, GatedFFN, "auto")
    layer.auto_state = ffn.AutoState(0.9)
    call(40)
    assert calls == []  # dense
    layer.auto_state = ffn.AutoState(0.0)
    answers.append(Sharing(LEARNED, 0.3))
    call(40)
    assert calls == [False]
    assert layer.auto_state.learned == LEARNED
    assert layer.auto_state.densest == 0.3
    assert layer.auto_state.density > 0.3


def test_a_layer_without_a_gate_does_not_share(rng, machine, layer_calls):
    layer, call = make_call(rng, machine, TwoMatrixFFN, "twell")
    call(40)
    assert layer.auto_state == ffn.AutoState()


@pytest.mark.parametrize("weight_format", ["csr", "block_ell"])
def test_a_layer_with_sparse_weights_does_not_share(rng, machine, weight_format, monkeypatch):
    monkeypatch.setattr(ffn, "FEWEST_SHARING", 35)
    weights = rng.standard_normal((3, 40, 32)).astype(np.float32)
    layer = GatedFFN("mlp", *weights)
    layer.hold_weights(weight_format, 8)
    for parameter in layer.parameters():
        parameter.move_to_gpu(machine.gpu.stream, np.float32)
    layer(machine.upload(rng.standard_normal((40, 32)).astype(np.float32)))
    assert layer.auto_state == ffn.AutoState()


def test_no_more_entries_are_tried_out_than_a_block_can_have():
    assert ffn.GPU_SHARING_ENTRIES == shared_lists.ENTRIES // shared_lists.TOKENS


def test_calls_are_counted_where_they_have_many_tokens(rng, layer_calls):
    layer = GatedFFN("mlp", *rng.standard_normal((3, 40, 32)).astype(np.float32), "twell")
    layer.auto_state = ffn.AutoState(sharing_tokens=0)
    for seen in (1000, None):  # more tokens than are asked for, but two calls
        layer.count_sharing_tokens(1000)
        assert layer.auto_state.sharing_tokens == seen


def test_auto_notes_which_path_was_taken(rng, machine, layer_calls):
    layer, call = make_call(rng, machine, GatedFFN, "auto")
    for density, took_twell in ((0.0, True), (0.9, False)):
        layer.auto_state = ffn.AutoState(density, sharing_tokens=0)
        call(40)
        assert layer.auto_state.took_twell == took_twell


def test_auto_takes_the_path_at_higher_densities_where_neurons_are_shared(
    rng, layer_calls, monkeypatch
):
    weights = rng.standard_normal((3, 40, 32)).astype(np.float32)
    layer, without_gate = GatedFFN("mlp", *weights), TwoMatrixFFN("mlp", *weights[:2])
    for density, sharing, tokens, path in (
        (0.045, (None, None), 40, "twell"),  # to be tried out
        (0.045, (None, None), 34, "dense"),
        (0.055, (None, None), 40, "dense"),
        (0.055, (LEARNED, None, 0.06), 40, "twell"),
        (0.045, (None, 0), 40, "dense"),
        (0.045, (LEARNED, 0, 0.046), 40, "twell"),
        (0.045, (LEARNED, 0, 0.044), 40, "dense"),
        (0.045, (LEARNED, 0, 0.046), 34, "dense"),
        (0.045, (None, 0, 0.046), 40, "dense"),  # by nothing that would be known
        (0.009, (LEARNED, 0, 0.0), 40, "twell"),  # as without sharing
        (0.047, (LEARNED, 0, 0.046, True), 40, "twell"),  # the path is kept
        (0.049, (LEARNED, 0, 0.046, True), 40, "dense"),
        (0.0104, (None, 0, 0.0, True), 34, "twell"),
        (0.0104, (None, 0, 0.0, False), 34, "dense"),
    ):
        layer.auto_state = without_gate.auto_state = ffn.AutoState(density, 0, *sharing)
        assert layer.next_path(tokens) == path, (density, sharing)
        limit = 0.0105 if sharing[3:] == (True,) else 0.01
        assert without_gate.next_path(tokens) == ("twell" if density < limit else "dense")
    layer.auto_state = ffn.AutoState(0.045)
    monkeypatch.setattr(ffn, "GPU_SHARING_ENTRIES", 1.6)  # of 40 neurons
    assert layer.next_path(40) == "dense"
    monkeypatch.setattr(ffn, "GPU_SHARING_ENTRIES", 2)
    assert layer.next_path(40) == "twell"
    monkeypatch.setattr(cuda, "can_share", lambda weight, tokens: False)
    assert layer.next_path(40) == "dense"
    assert not layer.measures_sharing(40)


def test_tokens_of_other_paths_count(rng, machine, layer_calls):
    answers, calls = layer_calls
    layer, call = make_call(rng, machine, GatedFFN, "auto")
    layer.auto_state = ffn.AutoState(0.9, 0, None, 0)
    for tokens_since in (40, 80, None):  # then it is tried out again
        call(40)
        assert layer.auto_state.sharing_tokens == tokens_since
    assert calls == answers == []
