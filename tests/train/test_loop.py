"""Whole training runs of a toy model: what they write, how they stop, how they go on."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.transformer import Transformer
from twell_numba.train import Interrupted, TrainConfig, train
from twell_numba.train import checkpoints as checkpoints_module
from twell_numba.train import interrupt as interrupt_module
from twell_numba.train import loop as loop_module
from twell_numba.train.config import with_overrides
from twell_numba.train.failure import Diverged
from twell_numba.train.interrupt import InterruptFlag
from twell_numba.train.loop import compile_kernels, load_corpus
from twell_numba.train.prepared import prepare
from twell_numba.train.report import Reporter
from twell_numba.train.run_folder import ADDED_SETTINGS, RunFolder
from twell_numba.train.trainer import Trainer

SUMMARY_KEYS = {
    "loss",
    "perplexity",
    "bits_per_byte",
    "ffn_activation_sparsity",
    "nonzeros_per_token",
    "dead_neuron_fraction",
    "ffn_weight_sparsity",
    "steps",
    "tokens",
    "tokens_per_second",
    "seconds",
    "device",
    "seed",
}
METRICS_KEYS = {
    "step",
    "tokens",
    "loss",
    "l1_loss",
    "gradient_norm",
    "learning_rate",
    "l1_strength",
    "tokens_per_second",
    "activation_sparsity",
    "nonzeros_per_token",
    "dead_neuron_fraction",
    "ffn_paths",
    "weight_l1_strength",
    "ffn_weight_density",
    "ffn_weight_format",
    "ffn_weight_bytes",
    "seconds_by_part",
    "peak_memory_bytes",
}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    lines = [f"def function_{n}(x):\n    return x * {n * n % 97}\n" for n in range(200)]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module")
def config(text_file):
    return TrainConfig(
        data=str(text_file),
        steps=12,
        d_model=16,
        d_ffn=24,
        n_layers=2,
        n_heads=2,
        context_length=16,
        batch_size=4,
        learning_rate=1e-2,
        warmup_steps=3,
        l1_activation=1e-2,
        l1_warmup_steps=4,
        dead_neuron_window=3,
        log_interval=2,
        eval_interval=5,
        eval_batches=2,
        sample_interval=6,
        sample_tokens=8,
        checkpoint_interval=4,
        keep_checkpoints=3,
    )


class InterruptingReporter(Reporter):
    """Sends a signal (Ctrl-C's), or dies, when a step is done."""

    def __init__(self, step, error=None, signal_number=signal.SIGINT):
        self._step = step
        self._error = error
        self._signal = signal_number

    def step(self, step, seconds_left):
        if step == self._step:
            if self._error is not None:
                raise self._error
            os.kill(os.getpid(), self._signal)


def quiet_train(config, run, resume=False, report=None):
    return train(config, run, resume, report or Reporter())


def outcome(run):
    """Everything in a run that must not depend on whether it was interrupted."""
    folder = RunFolder(run)
    step, checkpoint = folder.latest_checkpoint()
    state = json.loads((checkpoint / "training_state.json").read_text())
    del state["clocks"], state["settings"]["data"]
    rows = folder.read_metrics()
    for row in rows:
        del row["tokens_per_second"], row["seconds_by_part"], row["peak_memory_bytes"]
    tensors = {
        name: tensor.tobytes()
        for file in ("model.safetensors", "optimizer.safetensors")
        for name, tensor in read_tensors(checkpoint / file).items()
    }
    samples = {path.name: path.read_text() for path in folder.samples_path.iterdir()}
    summary = json.loads(folder.summary_path.read_text())
    del summary["tokens_per_second"], summary["seconds"]
    return step, state, rows, tensors, samples, summary


def test_a_run_writes_what_it_promises(tmp_path, config, capsys):
    run = tmp_path / "run"
    summary = train(config, run)
    assert capsys.readouterr().out == ""
    folder = RunFolder(run)
    assert summary.keys() == SUMMARY_KEYS
    assert json.loads(folder.summary_path.read_text()) == summary
    assert (summary["steps"], summary["tokens"], summary["seed"]) == (12, 12 * 64, 0)
    assert summary["loss"] < np.log(256) - 0.5, "it has learnt something"
    assert summary["perplexity"] == pytest.approx(np.exp(summary["loss"]))

    rows = folder.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 4, 5, 6, 8, 10, 12]
    evaluated = [row["step"] for row in rows if "validation_loss" in row]
    assert evaluated == [5, 10, 12]
    for row in rows:
        assert row.keys() - {"validation_loss"} == METRICS_KEYS
        assert len(row["nonzeros_per_token"]) == len(row["ffn_paths"]) == config.n_layers
        assert row["tokens"] == row["step"] * 64
    assert rows[-1]["validation_loss"] == summary["loss"]
    assert rows[0]["tokens_per_second"] is None
    assert rows[0]["seconds_by_part"].keys() == {"forward", "backward", "optimizer"}
    assert min(rows[0]["seconds_by_part"].values()) > 0
    assert rows[0]["peak_memory_bytes"] > 1 << 20
    assert rows[-1]["l1_strength"] == config.l1_activation
    assert rows[-1]["ffn_weight_density"] == dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), [1.0, 1.0]
    )
    assert rows[-1]["ffn_weight_format"] == "dense"
    assert rows[-1]["ffn_weight_bytes"] == 2 * 3 * 24 * 16 * 4

    assert folder.checkpoint_steps() == [4, 8, 12]
    assert sorted(path.name for path in folder.checkpoint_path(12).iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
        "training_state.json",
    ]
    assert sorted(path.name for path in folder.samples_path.iterdir()) == [
        "step-12.txt",
        "step-6.txt",
    ]
    assert (folder.samples_path / "step-6.txt").read_text().startswith("def ")
    assert folder.read_config() == config.filled_in()


def test_the_same_seed_gives_the_same_run_and_another_a_different_one(tmp_path, config):
    quiet_train(config, tmp_path / "first")
    quiet_train(config, tmp_path / "second")
    assert outcome(tmp_path / "first") == outcome(tmp_path / "second")
    quiet_train(with_overrides(config, ["seed=1"]), tmp_path / "third")
    assert outcome(tmp_path / "third")[3] != outcome(tmp_path / "first")[3]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["gradient_accumulation=2", "batch_size=2"],
        ["revive_dead=true", "l1_activation=3"],
        ["ffn=two_matrix", "tied_embeddings=false", "ffn_path=twell", "n_kv_heads=1"],
        ["tokenizer=bpe", "bpe_vocab_size=280"],
    ],
    ids=lambda overrides: overrides[0] if overrides else "plain",
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, config, overrides):
    """Faults 70 and 72: stopped at a checkpoint, between two, and by a crash."""
    config = with_overrides(config, overrides)
    quiet_train(config, tmp_path / "whole")

    run = tmp_path / "interrupted"
    with pytest.raises(
        Interrupted, match=r"step 3 of 12 and saved.*twell train --resume"
    ) as caught:
        quiet_train(config, run, report=InterruptingReporter(3))
    assert caught.value.exit_code == 130
    with pytest.raises(Interrupted) as caught:
        quiet_train(None, run, True, InterruptingReporter(4, signal_number=signal.SIGTERM))
    assert caught.value.exit_code == 143
    with pytest.raises(RuntimeError, match="power failure"):
        quiet_train(None, run, True, InterruptingReporter(7, RuntimeError("power failure")))
    assert RunFolder(run).latest_checkpoint()[0] == 4
    assert RunFolder(run).read_metrics()[-1]["step"] == 6
    quiet_train(None, run, resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_path_chosen_by_density_is_chosen_alike_after_a_resume(tmp_path, config):
    config = with_overrides(config, ["l1_activation=3", "steps=16"])
    quiet_train(config, tmp_path / "whole")
    paths = {tuple(row["ffn_paths"]) for row in RunFolder(tmp_path / "whole").read_metrics()}
    assert len(paths) > 1, "no layer changed its path: the test shows nothing"
    for stop in (6, 11):
        run = tmp_path / f"run-{stop}"
        with pytest.raises(Interrupted):
            quiet_train(config, run, report=InterruptingReporter(stop))
        quiet_train(None, run, resume=True)
        assert outcome(run) == outcome(tmp_path / "whole")


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory, config):
    """A run stopped after step 1; not to be changed."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        quiet_train(config, run, report=InterruptingReporter(1))
    return run


@pytest.fixture
def run(tmp_path, stopped_run):
    """A run stopped after step 1."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, config):
    """A run with checkpoints of steps 4, 8 and 12; not to be changed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    quiet_train(config, run)
    return run


def edit_state(checkpoint, **changes):
    path = checkpoint / "training_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(run, config=None, error=TwellError):
    """Return the one line with which a run is not resumed; nothing in it has changed."""

    def contents():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises(error) as caught:
        quiet_train(config, run, resume=True)
    assert contents() == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_resumed_run_goes_on_counting_time_and_speed(run):
    clocks = {"seconds": 1000.0, "timed_tokens": 64e6, "timed_seconds": 10.0}
    edit_state(RunFolder(run).checkpoint_path(1), clocks=clocks)
    summary = quiet_train(None, run, resume=True)
    assert 1000 < summary["seconds"] < 1100
    assert summary["tokens_per_second"] > 1e6
    state = json.loads((RunFolder(run).checkpoint_path(12) / "training_state.json").read_text())
    assert state["clocks"]["seconds"] > 1000
    assert state["clocks"]["timed_tokens"] == 64e6 + 10 * 64


@pytest.mark.parametrize(
    "override",
    [
        "preset=small",
        "seed=7",
        "d_model=32",
        "d_ffn=32",
        "n_layers=1",
        "n_heads=4",
        "n_kv_heads=1",
        "context_length=8",
        "rope_base=5000.0",
        "norm_eps=1e-4",
        "tied_embeddings=false",
        "ffn='two_matrix'",
        "ffn_path='dense'",
        "tokenizer='bpe'",
        "batch_size=2",
        "gradient_accumulation=2",
        "learning_rate=0.5",
        "weight_decay=0.0",
        "l1_activation=0.5",
        "dead_neuron_window=7",
        "weight_threshold=0.5",
        "target_density=0.5",
        "sparse_format='block_ell'",
    ],
)
def test_settings_edited_in_config_toml_are_refused(run, config, override):
    name = override.partition("=")[0]
    edited = with_overrides(config.filled_in(), [override])
    RunFolder(run).write_config(edited)
    message = refusal(run, error=UsageError)
    given, trained_with = getattr(edited, name), getattr(config.filled_in(), name)
    assert message.startswith(
        f"{name}={given!r} given to resume a run with {name}={trained_with!r}"
    )
    assert str(run / "config.toml") in message
    assert "delete" not in message
    # The same by the command line, and back.
    assert refusal(run, edited, UsageError) == message
    quiet_train(config, run, resume=True)


def test_a_config_toml_that_lacks_a_setting_is_refused(run):
    path = run / "config.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("learning_rate ")))
    assert "config.toml: no learning_rate given" in refusal(run)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [("max_position_embeddings", 8, "context_length"), ("rms_norm_eps", 0.5, "norm_eps")],
)
def test_a_model_description_that_was_edited_is_refused(run, key, value, name):
    path = RunFolder(run).checkpoint_path(1) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"{path} describes a model with {name}={value}, but" in refusal(run)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_arrays_of_another_step_are_refused(tmp_path, config, finished_run, name):
    run = shutil.copytree(finished_run, tmp_path / "run")
    folder = RunFolder(run)
    shutil.copy(folder.checkpoint_path(8) / name, folder.checkpoint_path(12) / name)
    message = refusal(run, with_overrides(config, ["steps=14"]))
    assert str(folder.checkpoint_path(12) / name) in message
    assert message.endswith(f"delete {folder.checkpoint_path(12)} to resume from step 8")
    shutil.rmtree(folder.checkpoint_path(12))
    quiet_train(None, run, resume=True)
    assert outcome(run) == outcome(finished_run)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path, finished_run):
    run = shutil.copytree(finished_run, tmp_path / "run")
    folder = RunFolder(run)
    shutil.rmtree(folder.checkpoint_path(12))
    folder.checkpoint_path(8).rename(folder.checkpoint_path(9))
    message = refusal(run)
    assert "training_state.json is of step 8, step 9 wanted" in message
    assert "delete" not in message


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(
    tmp_path, config, finished_run, name
):
    run = shutil.copytree(finished_run, tmp_path / "run")
    checkpoint = RunFolder(run).checkpoint_path(12)
    tensors = read_tensors(checkpoint / name)
    bad = next(key for key in sorted(tensors) if key.endswith("q_proj.weight"))
    tensors[bad][1, 2] = np.nan
    write_tensors(checkpoint / name, tensors, {"format": "pt"})
    files = json.loads((checkpoint / "training_state.json").read_text())["files"]
    checksum = checkpoints_module.file_checksum(checkpoint / name)
    edit_state(checkpoint, files=files | {name: checksum})
    message = refusal(run, with_overrides(config, ["steps=14"]))
    assert message.startswith(f"{checkpoint} cannot be trained on (step 12: ")
    assert bad in message
    assert message.endswith("delete it to resume from step 8")


def test_a_finished_run_goes_on_only_with_more_steps(tmp_path, config):
    run = tmp_path / "run"
    quiet_train(config, run)
    before = outcome(run)
    with pytest.raises(TwellError, match="has finished 12 steps of 12 wanted"):
        quiet_train(None, run, resume=True)
    fewer = with_overrides(config, ["steps=3"])
    with pytest.raises(TwellError, match="has finished 12 steps of 3 wanted; .* than 12"):
        quiet_train(fewer, run, resume=True)
    assert outcome(run) == before
    longer = with_overrides(config, ["steps=14"])
    assert quiet_train(longer, run, resume=True)["steps"] == 14
    assert [row["step"] for row in RunFolder(run).read_metrics()][-3:] == [10, 12, 14]
    assert RunFolder(run).read_config() == longer.filled_in()


def test_a_run_is_resumed_only_with_its_own_settings_and_data(tmp_path, config, text_file):
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes())
    config = with_overrides(config, [f"data={text}"])
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        quiet_train(config, run, report=InterruptingReporter(3))
    with pytest.raises(UsageError, match="d_model=32 given to resume a run with d_model=16"):
        quiet_train(with_overrides(config, ["d_model=32"]), run, resume=True)
    text.write_bytes(text_file.read_bytes().replace(b"return", b"retorn", 1))
    with pytest.raises(TwellError, match="is not what .* was trained on"):
        quiet_train(None, run, resume=True)
    text.write_bytes(text_file.read_bytes())
    quiet_train(None, run, resume=True)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("training_state.json", b"{}"),
        ("training_state.json", b"[]"),
        ("training_state.json", b"[" * 100_000),
        ("training_state.json", b'{"version": 1, "ste'),
        ("optimizer.safetensors", b"short"),
        ("model.safetensors", b"short"),
        ("config.json", b"[]"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(run, name, damage):
    path = RunFolder(run).checkpoint_path(1) / name
    path.write_bytes(damage)
    message = refusal(run)
    assert str(path) in message
    assert "delete" not in message, "there is no earlier checkpoint"
    path.unlink()
    assert str(path.parent) in refusal(run)


DAMAGED_VALUES = {
    "step": [0, -1, 1.0, True, "1", None, [], 10**30],
    "tokens": [0, 64.5, "64", None],
    "settings": [{}, [], 3, {"steps": 12}],
    "clocks": [
        [],
        {},
        {"seconds": 1.0},
        {"seconds": -1.0, "timed_tokens": 1.0, "timed_seconds": 1.0},
        {"seconds": 1.0, "timed_tokens": float("nan"), "timed_seconds": 1.0},
        {"seconds": 1.0, "timed_tokens": 1.0, "timed_seconds": float("inf")},
        {"seconds": 10**400, "timed_tokens": 1.0, "timed_seconds": 1.0},
        {"seconds": "1", "timed_tokens": 1.0, "timed_seconds": 1.0},
        {"seconds": True, "timed_tokens": 1.0, "timed_seconds": 1.0},
        {"seconds": None, "timed_tokens": 1.0, "timed_seconds": 1.0},
    ],
    "files": [[], {}, None, {"model.safetensors": 0}],
    "sampler": [{}, [], None, {"bit_generator": "MT19937"}],
    "revival": [{}, "state", {"bit_generator": "PCG64", "state": {"state": -1, "inc": 2**200}}],
    "dead_neurons": [{}, [], {"step": 1, "last_fired": []}, {"step": 10**30, "last_fired": [[0]]}],
    "weight_l1_strength": [0.1, 0, "0.1", [], False],
    "ffn_auto": [
        [],
        None,
        {},
        [3, 4],
        [[0.5, 0]],
        [[0.5, 0], [0.5, 0, 0]],
        *[[[0.5, 0], [density, 0]] for density in (2, -0.1, float("nan"), "0.5", True, [])],
        *[[[0.5, 0], [0.5, tokens]] for tokens in (-1, 0.5, float("inf"), "0", False, None)],
        *[[[0.5, 0], [0.5, 0, *sharing]] for sharing in ((0, 0), (True, -1), (False, 0.5))],
        *[
            [[0.5, 0], [0.5, 0, True, 9, *limit]]
            for limit in ([0.1], [-0.1, True], ["0", True], [2, True], [0, 0], [0, True, 0])
        ],
    ],
}


@pytest.mark.parametrize("key", DAMAGED_VALUES)
def test_an_edited_state_is_refused_in_one_line_that_names_it(run, key, monkeypatch):
    def never(*arguments):
        raise AssertionError("a damaged state was gone on from")

    monkeypatch.setattr(loop_module, "compile_kernels", never)
    checkpoint = RunFolder(run).checkpoint_path(1)
    path = checkpoint / "training_state.json"
    for value in DAMAGED_VALUES[key]:
        whole = path.read_text()
        edit_state(checkpoint, **{key: value})
        message = refusal(run)
        assert str(path) in message or key == "files", value
        if key in ("dead_neurons", "ffn_auto", "sampler", "revival"):
            assert f"is damaged ({key} is " in message, value
        path.write_text(whole)


def test_a_generator_state_that_does_not_fit_is_refused(run):
    checkpoint = RunFolder(run).checkpoint_path(1)
    state = json.loads((checkpoint / "training_state.json").read_text())
    state["sampler"]["state"]["state"] = 2**200
    edit_state(checkpoint, sampler=state["sampler"])
    assert "training_state.json is damaged" in refusal(run)


@pytest.mark.parametrize("version", [1, 4, None, -1, "x", 10**30, ...])
def test_a_state_of_another_version_is_refused(run, version):
    path = RunFolder(run).checkpoint_path(1) / "training_state.json"
    state = json.loads(path.read_text()) | {"version": version}
    if version is ...:
        del state["version"]
    path.write_text(json.dumps(state))
    shown = None if version is ... else version
    assert f"{path} is of version {shown!r}, 3 wanted; put it back" in refusal(run)
    assert "start a new run" in refusal(run)
    shutil.copytree(path.parent, earlier := RunFolder(run).checkpoint_path(0))
    assert f"or delete {path.parent} to resume from step 0" in refusal(run)
    path.unlink()
    assert f"or delete {path.parent} to resume from step 0" in refusal(run)
    shutil.rmtree(earlier)
    assert "a checkpoint of 'twell train' wanted" in refusal(run)


def test_a_state_that_lacks_something_is_refused(run):
    path = RunFolder(run).checkpoint_path(1) / "training_state.json"
    state = json.loads(path.read_text())
    assert {"sampler", "dead_neurons", "ffn_auto", "weight_l1_strength", "step"} <= state.keys()
    for key in state.keys() - {"version"}:
        path.write_text(json.dumps({name: state[name] for name in state if name != key}))
        message = refusal(run)
        assert f"{path} is damaged (" in message
        assert key in message


def test_a_run_of_the_first_version_can_be_resumed(run, finished_run):
    checkpoint = RunFolder(run).checkpoint_path(1)
    path = checkpoint / "training_state.json"
    state = json.loads(path.read_text())
    del state["weight_l1_strength"]
    for name in ADDED_SETTINGS:
        del state["settings"][name]
    path.write_text(json.dumps(state | {"version": 2}))
    quiet_train(None, run, resume=True)
    assert outcome(run) == outcome(finished_run)


def gradients(config, model_seed=3):
    """Return loss, L1 loss and gradients of one step in float64."""
    corpus = load_corpus(config)
    model = Transformer(
        config.model_config(256), np.random.default_rng(model_seed), dtype=np.float64
    )
    trainer = Trainer(config, corpus, model)
    result = trainer.take_step()
    return result, {name: parameter.grad for name, parameter in trainer.parameters.items()}


def test_one_batch_of_eight_is_eight_batches_of_one(config):
    """Fault 74: for the loss, the L1 term and every gradient."""
    config = with_overrides(config, ["l1_activation=0.5", "l1_warmup_steps=0", "ffn_path=dense"])
    whole, expected = gradients(with_overrides(config, ["batch_size=8"]))
    parts, found = gradients(with_overrides(config, ["batch_size=1", "gradient_accumulation=8"]))
    assert whole.l1_loss > 0
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.l1_loss == pytest.approx(whole.l1_loss, rel=1e-12)
    assert parts.statistics.nonzeros_per_token() == whole.statistics.nonzeros_per_token()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-9, atol=1e-13, err_msg=name)


def test_the_l1_term_is_in_the_gradient_with_the_weight_it_is_reported_with(config):
    """A finite difference of loss + L1 along a random direction, in float64."""
    config = with_overrides(config, ["l1_activation=0.5", "l1_warmup_steps=0", "ffn_path=dense"])
    corpus = load_corpus(config)
    direction_rng = np.random.default_rng(5)
    totals = {}
    slope = 0.0
    shapes = config.model_config(256).parameter_shapes()
    direction = {name: direction_rng.standard_normal(shape) for name, shape in shapes.items()}
    for offset in (-1e-6, 0.0, 1e-6):
        model = Transformer(config.model_config(256), np.random.default_rng(3), dtype=np.float64)
        for name, parameter in model.parameters().items():
            parameter.value += offset * direction[name]
        trainer = Trainer(config, corpus, model)
        result = trainer.take_step()
        totals[offset] = result.loss + result.l1_loss
        if offset == 0.0:
            slope = sum(
                float(np.vdot(parameter.grad, direction[name]))
                for name, parameter in trainer.parameters.items()
            )
    measured = (totals[1e-6] - totals[-1e-6]) / 2e-6
    assert slope == pytest.approx(measured, rel=1e-4)


def test_revival_changes_gates_of_dead_neurons_only(config):
    """Fault 77, in a run: the same step with and without revival."""
    config = with_overrides(config, ["dead_neuron_window=1"])
    corpus = load_corpus(config)
    trainers = []
    for revive in ("false", "true"):
        trainer = Trainer(with_overrides(config, [f"revive_dead={revive}"]), corpus)
        # Neuron 0 of layer 1 never fires: its gate row is zero.
        trainer.parameters["model.layers.1.mlp.gate_proj.weight"].value[0] = 0
        trainer.take_step()
        trainers.append(trainer)
    without, with_revival = trainers
    dead = without.dead_neurons.dead()
    assert dead[1, 0]
    for name, parameter in without.parameters.items():
        revived = with_revival.parameters[name].value
        if name.endswith("gate_proj.weight"):
            layer = int(name.split(".")[2])
            changed = (revived != parameter.value).any(axis=1)
            np.testing.assert_array_equal(changed, dead[layer])
        else:
            np.testing.assert_array_equal(revived, parameter.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "weights in model.layers.1.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "weights in model.embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_loss_that_is_not_finite_names_step_and_weights(config, name, message, value):
    """Fault 73."""
    trainer = Trainer(config, load_corpus(config))
    trainer.take_step()
    trainer.parameters[name].value[:] = value
    with pytest.raises(Diverged, match=f"step 2: the loss is (nan|inf), as {message}"):
        trainer.take_step()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_activations_that_overflow_are_named_by_layer(config):
    trainer = Trainer(config, load_corpus(config))
    trainer.parameters["model.layers.0.mlp.up_proj.weight"].value[:] = 1e38
    with pytest.raises(Diverged) as caught:
        trainer.take_step()
    assert "step 1: the loss is" in str(caught.value)
    assert "activations of model.layers.0.mlp" in str(caught.value)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(config):
    trainer = Trainer(config, load_corpus(config))
    before = {name: parameter.value.copy() for name, parameter in trainer.parameters.items()}
    bad = "model.layers.1.self_attn.o_proj.weight"
    norm = trainer.optimizer.gradient_norm

    def spoil_one_gradient():
        trainer.parameters[bad].grad[2, 3] = np.nan
        return norm()

    trainer.optimizer.gradient_norm = spoil_one_gradient
    with pytest.raises(Diverged, match=f"step 1: the gradient is not finite, first in {bad}"):
        trainer.take_step()
    assert trainer.step_count == 0
    for name, parameter in trainer.parameters.items():
        np.testing.assert_array_equal(parameter.value, before[name])


def test_a_run_that_fails_in_its_first_step_leaves_no_folder(tmp_path, config, monkeypatch):
    def diverge(self):
        raise Diverged("step 1: the loss is inf", "try another setting")

    monkeypatch.setattr(Trainer, "take_step", diverge)
    message = "step 1: the loss is inf; no checkpoint had been saved yet; try another setting"
    with pytest.raises(TwellError, match=message):
        quiet_train(config, tmp_path / "runs" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("strength", "message"),
    [
        (1e300, "the gradient is not finite"),
        (1.7e308, "the loss is inf, first seen in the L1 term"),
    ],
)
def test_an_l1_term_that_overflows_is_to_be_made_smaller(config, strength, message):
    # Settings as large as these are refused; larger activations do the same.
    config = dataclasses.replace(config, l1_activation=strength, l1_warmup_steps=0)
    trainer = Trainer(config, load_corpus(config))
    trainer.parameters["model.layers.0.mlp.up_proj.weight"].value *= 1e6
    with pytest.raises(Diverged, match=message) as caught:
        trainer.take_step()
    assert caught.value.advice == "try a smaller l1_activation"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_diverging_loss_is_not_laid_to_the_l1_term(config):
    config = with_overrides(config, ["tied_embeddings=false"])
    trainer = Trainer(config, load_corpus(config))
    trainer.parameters["model.norm.weight"].value[:] = 1e38
    trainer.parameters["lm_head.weight"].value *= 1e6
    with pytest.raises(Diverged, match="first seen in the logits") as caught:
        trainer.take_step()
    assert "learning_rate" in caught.value.advice


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (5, "step 6: the loss is nan, as weights in {} are not finite"),
        (6, "step 6: weights are not finite, first in {}"),
    ],
    ids=["before a step", "before a sample"],
)
def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(
    tmp_path, config, step, place
):
    """Fault 73: nothing is saved over a good checkpoint once a number is not finite."""
    name = "model.layers.0.mlp.gate_proj.weight"

    class Spoiler(Reporter):
        def step(self, done, seconds_left):
            if done == step:
                spoiled[0].parameters[name].value[:] = np.nan

    spoiled = []
    original = Trainer.take_step

    def take_step(self):
        spoiled[:] = [self]
        return original(self)

    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_step)
        with pytest.raises(TwellError) as caught:
            quiet_train(config, run, report=Spoiler())
    message = str(caught.value)
    assert message.startswith(place.format(name))
    assert f"the last good checkpoint is {run / 'checkpoints' / 'step-4'}" in message
    assert "\n" not in message
    assert RunFolder(run).checkpoint_steps() == [4]
    quiet_train(None, run, resume=True)


def test_weights_that_are_not_finite_are_not_saved(config):
    trainer = Trainer(config, load_corpus(config))
    trainer.require_finite_state()
    moment = trainer.optimizer.second_moment["model.norm.weight"]
    moment[3] = np.inf
    with pytest.raises(Diverged, match=r"second_moment\.model\.norm\.weight is not finite"):
        trainer.require_finite_state()
    trainer.parameters["model.norm.weight"].value[0] = np.nan
    with pytest.raises(Diverged, match=r"weights are not finite, first in model\.norm\.weight"):
        trainer.require_finite_state()


def test_a_full_disk_stops_the_run_and_keeps_earlier_checkpoints(tmp_path, config, monkeypatch):
    """Fault 68."""
    write = checkpoints_module.write_tensors

    def write_until_the_disk_is_full(path, tensors, metadata=None):
        if "step-8" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors, metadata)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "write_tensors", write_until_the_disk_is_full)
        with pytest.raises(TwellError, match=r"step-8: No space left on device"):
            quiet_train(config, run)
    assert os.listdir(run / "checkpoints") == ["step-4"]
    quiet_train(None, run, resume=True)
    quiet_train(config, tmp_path / "whole")
    assert outcome(run) == outcome(tmp_path / "whole")


def test_an_existing_run_is_refused_before_anything_is_done(tmp_path, config):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("precious")
    with pytest.raises(TwellError, match="exists already"):
        quiet_train(with_overrides(config, ["data=/nowhere"]), run)
    assert os.listdir(run) == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_done(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(TwellError, match="cannot use .*run: Not a directory"):
        quiet_train(with_overrides(config, ["data=/nowhere"]), tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data=/nowhere/at/all", TwellError, "no data at /nowhere/at/all"),
        ("data=/nowhere/at/all.bin", TwellError, "no prepared data at"),
        ("context_length=4096", TwellError, "held-out tokens given, at least context_length"),
        ("sample_prompt=a prompt of more tokens", UsageError, "sample_prompt of 23 tokens given"),
    ],
)
def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, config, override, error, message):
    run = tmp_path / "run"
    with pytest.raises(error, match=message):
        quiet_train(with_overrides(config, [override]), run)
    assert not run.exists()


def test_a_run_is_resumed_from_another_directory_and_after_its_data_moved(
    tmp_path, config, text_file, monkeypatch
):
    (tmp_path / "text.txt").write_bytes(text_file.read_bytes())
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        quiet_train(
            with_overrides(config, ["data=text.txt"]), "run", False, InterruptingReporter(3)
        )
    monkeypatch.chdir("/")
    with pytest.raises(Interrupted):
        quiet_train(None, run, True, InterruptingReporter(5))
    moved = with_overrides(RunFolder(run).read_config(), [f"data={text_file}"])
    (tmp_path / "text.txt").unlink()
    quiet_train(moved, run, True)
    assert RunFolder(run).read_config().data == str(text_file)


def test_prepared_data_trains_as_the_text_does(tmp_path, config, text_file):
    prepare(str(text_file), tmp_path / "data.bin")
    prepared = with_overrides(config, [f"data={tmp_path / 'data.bin'}"])
    quiet_train(prepared, tmp_path / "prepared")
    quiet_train(config, tmp_path / "text")
    assert outcome(tmp_path / "prepared") == outcome(tmp_path / "text")


def test_prepared_data_has_its_own_tokenizer(tmp_path, config, text_file):
    prepare(str(text_file), tmp_path / "data.bin", tokenizer="bpe", bpe_vocab_size=260)
    notes = []

    class Noting(Reporter):
        def note(self, line):
            notes.append(line)

    for tokenizer, is_said in (("byte", True), ("bpe", False)):
        settings = [f"data={tmp_path / 'data.bin'}", f"tokenizer={tokenizer}", "steps=1"]
        quiet_train(with_overrides(config, settings), tmp_path / tokenizer, False, Noting())
        said = [line for line in notes if "was prepared with a tokenizer of 260 tokens" in line]
        assert bool(said) == is_said, notes
        assert not any("with a bpe tokenizer" in line for line in notes)
        notes.clear()


def test_damaged_tokens_are_named(tmp_path, config):
    corpus = load_corpus(config)
    trainer = Trainer(config, corpus)
    corpus.training.setflags(write=False)
    trainer.sampler = type(trainer.sampler)(
        np.full(100, 999), config.context_length, np.random.default_rng(0)
    )
    with pytest.raises(TwellError, match="token 999 found in the data"):
        trainer.take_step()


def test_training_works_in_a_thread_that_is_not_the_main_one(tmp_path, config):
    summaries = []
    thread = threading.Thread(
        target=lambda: summaries.append(quiet_train(config, tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert summaries[0]["steps"] == 12


def test_compiling_changes_no_weight_and_no_path(config):
    trainer = Trainer(config, load_corpus(config))
    before = {name: parameter.value.copy() for name, parameter in trainer.parameters.items()}
    compile_kernels(trainer.model, np.arange(17))
    trainer.optimizer.compile()
    assert trainer.model.ffn_path == "auto"
    assert trainer.step_count == 0
    for name, parameter in trainer.parameters.items():
        np.testing.assert_array_equal(parameter.value, before[name])


SIGNALS = [signal.SIGINT, signal.SIGTERM]
if sys.platform != "win32":
    SIGNALS.append(signal.SIGHUP)


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_ctrl_c_stops_at_once_and_the_handlers_are_put_back(first):
    before = [signal.getsignal(number) for number in SIGNALS]

    def send_two():
        with InterruptFlag() as interrupt:
            os.kill(os.getpid(), first)
            assert interrupt.signal_number == first
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        send_two()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_stays_ignored(number):
    """As by nohup, or for a background process of a shell script."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        with InterruptFlag() as interrupt:
            assert signal.getsignal(number) == signal.SIG_IGN
            os.kill(os.getpid(), number)
            assert not interrupt.is_set
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, previous)


def test_a_notice_that_cannot_be_written_stops_nothing(monkeypatch):
    written = []

    def refuse(descriptor, notice):
        written.append(notice)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(interrupt_module.os, "write", refuse)
    for stderr in (sys.__stderr__, None):
        monkeypatch.setattr(sys, "__stderr__", stderr)
        with InterruptFlag() as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.is_set
    assert len(written) == 1, "descriptor 2 is not ours if stderr was closed"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_sigterm_that_is_sent_twice_is_still_a_request(first):
    with InterruptFlag() as interrupt:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal_number == first


def test_a_run_that_is_being_trained_cannot_be_resumed(tmp_path, config):
    run = tmp_path / "run"
    refused = []

    class Rival(Reporter):
        def step(self, step, seconds_left):
            if step == 5:
                before = sorted(path.name for path in run.rglob("*"))
                with pytest.raises(TwellError, match="run is being trained by another process"):
                    quiet_train(None, run, resume=True)
                assert sorted(path.name for path in run.rglob("*")) == before
                refused.append(step)

    quiet_train(config, run, report=Rival())
    assert refused == [5]
    quiet_train(config, tmp_path / "alone")
    assert outcome(run) == outcome(tmp_path / "alone")


INTERRUPTED_PROGRAM = """
import sys
from twell_numba.errors import TwellError
from twell_numba.train import TrainConfig, train
config = TrainConfig(data=sys.argv[1], steps=10**6, d_model=16, d_ffn=24, n_layers=1, n_heads=2,
                     context_length=16, batch_size=4, eval_interval=0, checkpoint_interval=0)
try:
    train(config, sys.argv[2])
except TwellError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals for one process")
@pytest.mark.parametrize(
    ("signal_number", "exit_code"),
    list(zip(SIGNALS, (130, 143, 129), strict=False)),
)
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, text_file, signal_number, exit_code):
    run = tmp_path / "my run"
    arguments = [sys.executable, "-c", INTERRUPTED_PROGRAM, str(text_file), str(run)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if line.startswith("step"):
                process.send_signal(signal_number)
                break
        try:
            output, notes = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == exit_code, notes
    assert "finishing this step" in notes
    assert f"go on with: twell train --resume '{run}'" in output
    assert len(RunFolder(run).checkpoint_steps()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_does_not_stop_a_run(tmp_path, text_file, redirection):
    run = tmp_path / "run"
    program = INTERRUPTED_PROGRAM.replace("10**6", "4")
    command = f'exec "$0" -c "$1" "$2" "$3" {redirection}'
    arguments = [sys.executable, program, str(text_file), str(run)]
    done = subprocess.run(["sh", "-c", command, *arguments], timeout=60, stdout=subprocess.PIPE)
    assert done.stdout == b""
    assert RunFolder(run).checkpoint_steps() == [4]
    assert RunFolder(run).summary_path.is_file()
