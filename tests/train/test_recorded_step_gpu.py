"""Training on a GPU, emulated or real, gives what training on the CPU gives."""

import json
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from twell_numba.device.arrays import to_host
from twell_numba.layers import ffn, rms_norm
from twell_numba.train.config import from_settings
from twell_numba.train.corpus import TokenCorpus
from twell_numba.train.failure import Diverged
from twell_numba.train.learned_patterns import pattern_arrays
from twell_numba.train.trainer import Trainer

VOCABULARY = 11
SMALL = {
    "d_model": 8,
    "d_ffn": 8,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "context_length": 4,
    "batch_size": 2,
    "steps": 20,
    "learning_rate": 1e-2,
    "l1_activation": 0.05,
    "l1_warmup_steps": 3,
    "gradient_clip": 0.5,
    "precision": "float32",
}


def trainer_of(**changes):
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 500)
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY)
    corpus = TokenCorpus("text", 1, 500, tokenizer, tokens[:400], tokens[400:])
    return Trainer(from_settings(SMALL | changes), corpus)


def trainers_of(machine, **changes):
    on_cpu, on_gpu = trainer_of(**changes), trainer_of(**changes)
    on_gpu.move_to_gpu(machine.gpu.stream)
    on_gpu.recorded.compile()
    return on_cpu, on_gpu


def require_equal_steps(on_cpu, on_gpu, steps, rtol=1e-4):
    for _ in range(steps):
        expected, actual = on_cpu.take_step(), on_gpu.take_step()
        for name in ("loss", "l1_loss", "gradient_norm"):
            assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=rtol), name
        np.testing.assert_array_equal(actual.statistics.fired, expected.statistics.fired)
        assert actual.statistics.nonzeros_per_token() == expected.statistics.nonzeros_per_token()
        assert actual.seconds_by_part.keys() == expected.seconds_by_part.keys()
    for name, parameter in on_cpu.parameters.items():
        value = to_host(on_gpu.parameters[name].value)
        np.testing.assert_allclose(value, parameter.value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"ffn_path": "dense"},
        {"ffn_path": "twell", "gradient_accumulation": 2, "n_layers": 1},
        {"ffn": "two_matrix", "recompute": True, "tied_embeddings": False},
    ],
    ids=["dense", "twell", "two-matrix"],
)
def test_steps_are_those_of_the_cpu(machine, changes):
    # the third step is the first one that is replayed
    require_equal_steps(*trainers_of(machine, **changes), steps=3)


def test_a_step_that_is_not_finite_changes_nothing(machine):
    _, trainer = trainers_of(machine, ffn_path="dense")
    for _ in range(2):
        trainer.take_step()
    name = "model.norm.weight"
    weight = to_host(trainer.parameters[name].value).copy()
    trainer.parameters[name].value.copy_from(np.full_like(weight, np.inf))
    trainer.recorded.discard()
    before = {name: to_host(p.value) for name, p in trainer.parameters.items()}
    moments = trainer.optimizer.state_arrays()
    with pytest.raises(Diverged, match=r"step 3: the loss is nan, as weights in model\.norm"):
        trainer.take_step()
    assert trainer.step_count == 2
    for name, parameter in trainer.parameters.items():
        np.testing.assert_array_equal(to_host(parameter.value), before[name])
    for name, moment in trainer.optimizer.state_arrays().items():
        np.testing.assert_array_equal(moment, moments[name])


def test_moments_go_with_the_weights(machine):
    on_cpu, other = trainer_of(ffn_path="dense"), trainer_of(ffn_path="dense")
    for _ in range(2):
        on_cpu.take_step()
        other.take_step()
    other.move_to_gpu(machine.gpu.stream)
    require_equal_steps(on_cpu, other, steps=2)
    other.recorded.release()
    for name, moment in on_cpu.optimizer.state_arrays().items():
        np.testing.assert_allclose(
            other.optimizer.state_arrays()[name], moment, rtol=1e-3, atol=1e-7
        )


@pytest.mark.parametrize("sparse_format", ["csr", "block_ell"])
def test_zeros_are_frozen(machine, sparse_format):
    changes = {
        "target_density": 0.5,
        "sparse_from": 3,
        "l1_warmup_steps": 1,
        "l1_activation": 0.0,
        "sparse_format": sparse_format,
        "block_size": 4,
    }
    require_equal_steps(*trainers_of(machine, **changes), steps=5)


def test_dead_neurons_are_revived(machine):
    _, trainer = trainers_of(
        machine, ffn_path="dense", revive_dead=True, dead_neuron_window=1, l1_activation=100.0
    )
    for _ in range(3):
        trainer.take_step()
    name = "model.layers.0.mlp.gate_proj.weight"
    before = to_host(trainer.parameters[name].value)
    trainer.dead_neurons.last_fired[0] = 0
    trainer._revive_dead()
    dead = trainer.dead_neurons.dead()[0]
    after = to_host(trainer.parameters[name].value)
    change = after[dead] - 0.9 * before[dead]
    assert 0 < np.abs(change).max() < 0.02
    np.testing.assert_array_equal(after[~dead], before[~dead])


def test_a_gradient_that_is_not_finite_is_found(machine, monkeypatch):
    from twell_numba.kernels.cuda_sums import add_into

    _, trainer = trainers_of(machine, ffn_path="dense")
    name = "model.layers.1.input_layernorm.weight"
    spoiled = trainer.parameters[name].grad
    infinite = machine.upload(np.full(spoiled.shape, np.inf, np.float32))
    original = rms_norm.rms_norm_backward

    def backward(dy, x, weight, inverse_rms, weight_grad, residual):
        dx = original(dy, x, weight, inverse_rms, weight_grad, residual)
        if weight_grad is spoiled:
            add_into(weight_grad, infinite)
        return dx

    trainer.take_step()
    before = trainer.optimizer.state_arrays()
    monkeypatch.setattr(rms_norm, "rms_norm_backward", backward)
    trainer.recorded.forget()
    with pytest.raises(Diverged, match=f"step 2: the gradient is not finite, first in {name}"):
        trainer.take_step()
    for key, moment in trainer.optimizer.state_arrays().items():
        np.testing.assert_array_equal(moment, before[key])


def test_times_are_those_of_the_gpu(machine):
    _, trainer = trainers_of(machine, ffn_path="dense", gradient_accumulation=2, n_layers=1)
    for _ in range(3):
        begin = time.perf_counter()
        result = trainer.take_step()
        assert 0 < sum(result.seconds_by_part.values()) < time.perf_counter() - begin
        time.sleep(0.3)


def test_nothing_is_left_on_the_gpu(machine):
    if machine.is_real:
        pytest.skip("what is allocated there is known to the emulator alone")
    _, trainer = trainers_of(machine, ffn_path="dense", n_layers=1)
    trainer.take_step()
    trainer.recorded.release()
    trainer.recorded = None
    trainer.model.rotary_on_gpu = ()
    assert not machine.gpu.regions


@pytest.mark.parametrize("path", ["dense", "twell"])
def test_what_is_forgotten_keeps_no_memory(machine, path):
    _, trainer = trainers_of(machine, ffn_path=path, n_layers=1)
    trainer.take_step()  # what the next step needs is recorded meanwhile
    (recorded,) = trainer.recorded._recorded.values()
    recording = weakref.ref(recorded._graph)
    assert recording() is not None
    del recorded
    trainer.recorded.forget()
    assert recording() is None


def test_shared_neurons_are_learned_anew_between_replays(hopper_machine, monkeypatch):
    changes = {"ffn_path": "twell", "n_layers": 1, "precision": "bfloat16", "batch_size": 10}
    kernels = shared_neurons_of(monkeypatch)
    alone, sharing = (trainers_of(hopper_machine, **changes)[1] for _ in range(2))
    monkeypatch.setattr(ffn, "FEWEST_SHARING", 10**9)
    expected = [alone.take_step().loss for _ in range(5)]
    assert alone.model.ffn_layers[0].auto_state.learned is None
    monkeypatch.setattr(ffn, "FEWEST_SHARING", 1)
    monkeypatch.setattr(ffn, "TOKENS_A_MEASUREMENT_OF_SHARING", 120)
    monkeypatch.setattr(ffn, "CALLS_A_MEASUREMENT_OF_SHARING", 1)
    layer, learned = sharing.model.ffn_layers[0], []
    losses = []
    for _ in range(5):  # measured, compiled, recorded, replayed, measured
        losses.append(sharing.take_step().loss)
        learned.append(layer.auto_state.learned)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert learned[0] is not None
    assert learned[0] is learned[3]
    assert learned[4] is not learned[0]
    assert len(kernels) >= 2


def test_a_resumed_run_goes_by_what_was_learned(hopper_machine, monkeypatch):
    changes = {"ffn_path": "twell", "n_layers": 1, "precision": "bfloat16", "batch_size": 10}
    shared_neurons_of(monkeypatch)
    monkeypatch.setattr(ffn, "FEWEST_SHARING", 1)
    monkeypatch.setattr(ffn, "TOKENS_A_MEASUREMENT_OF_SHARING", 120)
    monkeypatch.setattr(ffn, "CALLS_A_MEASUREMENT_OF_SHARING", 1)
    trainer = trainers_of(hopper_machine, **changes)[1]
    assert trainer.model.ffn_layers[0].auto_state == ffn.AutoState()  # compiling teaches nothing
    for _ in range(2):
        trainer.take_step()
    arrays = trainer.optimizer.state_arrays() | pattern_arrays(trainer.model)
    assert "ffn_learned.0.scores" in arrays
    state = json.loads(json.dumps(trainer.state_dict()))
    weights = {name: to_host(p.value).copy() for name, p in trainer.parameters.items()}

    resumed = trainer_of(**changes)
    for name, parameter in resumed.parameters.items():
        parameter.value[...] = weights[name]
    resumed.load_state(state, arrays)
    resumed.move_to_gpu(hopper_machine.gpu.stream)
    resumed.recorded.compile()
    for _ in range(3):  # in the last, both learn anew
        assert resumed.take_step().gradient_norm == trainer.take_step().gradient_norm
    for name, parameter in resumed.parameters.items():
        np.testing.assert_array_equal(
            to_host(parameter.value), to_host(trainer.parameters[name].value), err_msg=name
        )
    for damaged in (
        {"ffn_learned.0.hot_neurons": np.array([-1], np.int32)},
        {"ffn_learned.0.scores": np.full((8, 128), 128, np.uint8)},
    ):
        with pytest.raises(ValueError, match="is not what a run saves"):
            trainer_of(**changes).load_state(state, arrays | damaged)


def test_auto_goes_by_what_layers_measure_of_sharing(machine, monkeypatch):
    from twell_numba.kernels.twell import cuda
    from twell_numba.kernels.twell.token_groups import LearnedPattern, Sharing

    scores = machine.upload(np.zeros((SMALL["d_ffn"], 128), np.uint8))
    pattern, densest, measured = LearnedPattern(scores), [0.9], []

    def learn(activations, width, learned):
        measured.append(learned)
        return Sharing(pattern, densest[-1])

    monkeypatch.setattr(cuda, "learn_to_share", learn)
    monkeypatch.setattr(cuda, "can_share", lambda weight, tokens: True)
    monkeypatch.setattr(ffn, "FEWEST_SHARING", 1)
    monkeypatch.setattr(ffn, "GPU_AUTO_SIZE", 1)
    monkeypatch.setattr(ffn, "GPU_SHARING_DENSITY", 0.8)
    monkeypatch.setattr(ffn, "GPU_SHARING_ENTRIES", SMALL["d_ffn"])
    _, trainer = trainers_of(machine, ffn_path="auto")
    layers = trainer.model.ffn_layers
    measured.clear()  # compiling teaches nothing
    paths = [trainer.take_step().statistics.paths[0] for _ in range(4)]
    assert paths == ["dense", "twell", "twell", "twell"]
    assert measured == [None, None]  # each layer has, once
    for layer in layers:
        state = layer.auto_state
        assert 0.1 < state.density < 0.8
        assert (state.learned, state.densest, state.took_twell) == (pattern, 0.9, True)

    arrays = trainer.optimizer.state_arrays() | pattern_arrays(trainer.model)
    resumed = trainer_of(ffn_path="auto")
    resumed.load_state(json.loads(json.dumps(trainer.state_dict())), arrays)
    for layer, other in zip(layers, resumed.model.ffn_layers, strict=True):
        assert other.auto_state == layer.auto_state._replace(learned=None)
    # of before densities were measured, and one of which the pattern is not there
    for numbers, kept in ((4, arrays), (6, trainer.optimizer.state_arrays())):
        state = json.loads(json.dumps(trainer.state_dict()))
        state["ffn_auto"] = [saved[:numbers] for saved in state["ffn_auto"]]
        older = trainer_of(ffn_path="auto")
        older.load_state(state, kept)
        assert all(layer.measures_sharing(8) for layer in older.model.ffn_layers)

    # one layer is due, and all measure with it: recordings are made anew for one as for all
    state = layers[0].auto_state
    layers[0].auto_state = state._replace(sharing_tokens=ffn.TOKENS_A_MEASUREMENT_OF_SHARING - 1)
    trainer.recorded.discard()
    densest.append(0.85)
    trainer.take_step()
    assert measured == [None, None, pattern, pattern]
    trainer.take_step()
    assert [layer.auto_state.densest for layer in layers] == [0.85, 0.85]


def shared_neurons_of(monkeypatch):
    """Let blocks of any tokens share neurons, never as they did before; return what is learned."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")
    from twell_numba.kernels.twell import shared_neurons

    found = []

    def learn(packed, lists):
        found.append(original(packed, lists))
        return found[-1]

    original = shared_neurons.learn_pattern
    monkeypatch.setattr(shared_neurons, "learn_pattern", learn)
    monkeypatch.setattr(shared_neurons, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(shared_neurons, "ENTRIES_A_NEURON", -1.0)
    monkeypatch.setattr(shared_neurons, "WORTH_LEARNING", 1e-9)
    return found
