"""Runs that make feedforward weights sparse: L1, thresholds, targets, and what comes after."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.formats.tensor_file import read_tensors
from twell_numba.infer.weight_cut import entries_left
from twell_numba.layers.parameter import Parameter, SparseParameter
from twell_numba.models.checkpoint import load_model, save_model
from twell_numba.train import Interrupted, TrainConfig, train
from twell_numba.train.checkpoints import file_checksum
from twell_numba.train.config import with_overrides
from twell_numba.train.failure import StepFailed
from twell_numba.train.freezing import at_stored_entries, freeze_zeros, thinned_copy
from twell_numba.train.loop import compile_sparse_path, load_corpus
from twell_numba.train.report import Reporter
from twell_numba.train.run_folder import RunFolder
from twell_numba.train.schedule import weight_density
from twell_numba.train.trainer import Trainer
from twell_numba.train.weight_sparsity import (
    TARGET_BLOCK_STRENGTH,
    TARGET_STRENGTH,
    WeightSparsity,
    weight_statistics,
)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    lines = [f"def function_{n}(x):\n    return x * {n * n % 97}\n" for n in range(200)]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module")
def config(text_file):
    """A run that reaches a tenth of its weights in step 8, and trains these for 4 more."""
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
        warmup_steps=2,
        l1_warmup_steps=2,
        target_density=0.1,
        sparse_from=8,
        block_size=5,
        log_interval=1,
        eval_interval=0,
        eval_batches=2,
        sample_interval=9,
        sample_tokens=4,
        checkpoint_interval=0,
        keep_checkpoints=5,
    )


BLOCKS = ["sparse_format=block_ell"]


class Stop(Reporter):
    """Asks a run to stop after a step."""

    def __init__(self, step):
        self._step = step

    def step(self, step, seconds_left):
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def quiet_train(config, run, resume=False, report=None):
    return train(config, run, resume, report or Reporter())


def outcome(run):
    """Everything in a run that must not depend on whether it was interrupted."""
    folder = RunFolder(run)
    step, checkpoint = folder.latest_checkpoint()
    state = json.loads((checkpoint / "training_state.json").read_text())
    del state["clocks"]
    rows = folder.read_metrics()
    for row in rows:
        del row["tokens_per_second"], row["seconds_by_part"], row["peak_memory_bytes"]
    tensors = {
        name: tensor.tobytes()
        for file in ("model.safetensors", "optimizer.safetensors")
        for name, tensor in read_tensors(checkpoint / file).items()
    }
    return step, state, rows, tensors


def make_trainer(config):
    return Trainer(config, load_corpus(config))


def ffn_parameters(trainer):
    return [parameter for ffn in trainer.model.ffn_layers for parameter in ffn.parameters()]


def moment_bytes(trainer):
    moments = trainer.optimizer.first_moment
    return sum(moments[parameter.name].nbytes for parameter in ffn_parameters(trainer))


def step_to(trainer, step):
    while trainer.step_count < step:
        result = trainer.take_step()
    return result


# ---------------------------------------------------------------------- the proximal step


def zero_fraction(trainer):
    values = [parameter.value for parameter in ffn_parameters(trainer)]
    return 1 - sum(map(np.count_nonzero, values)) / sum(value.size for value in values)


def test_l1_moves_each_weight_towards_zero_by_learning_rate_times_strength(config):
    config = with_overrides(config, ["target_density=1", "sparse_from=0", "l1_warmup_steps=0"])
    plain, sparse = make_trainer(config), make_trainer(with_overrides(config, ["l1_weight=0.5"]))
    rate = plain.take_step().learning_rate
    result = sparse.take_step()
    assert result.weight_l1_strength == 0.5
    amount = np.float32(rate * 0.5)
    for before, after in zip(ffn_parameters(plain), ffn_parameters(sparse), strict=True):
        expected = np.sign(before.value) * np.maximum(np.abs(before.value) - amount, 0)
        np.testing.assert_allclose(after.value, expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(after.value == 0, np.abs(before.value) <= amount)
    assert zero_fraction(plain) == 0
    assert zero_fraction(sparse) > 0
    others = sparse.parameters.keys() - {parameter.name for parameter in ffn_parameters(sparse)}
    for name in others:
        np.testing.assert_array_equal(sparse.parameters[name].value, plain.parameters[name].value)


def test_the_strength_rises_over_the_warmup(config):
    config = with_overrides(
        config, ["target_density=1", "sparse_from=0", "l1_weight=0.4", "l1_warmup_steps=4"]
    )
    trainer = make_trainer(config)
    strengths = [trainer.take_step().weight_l1_strength for _ in range(6)]
    assert strengths == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_l1_on_blocks_empties_whole_blocks(config):
    config = with_overrides(
        config, ["target_density=1", "sparse_from=0", "l1_block=0.8", "l1_warmup_steps=0"]
    )
    trainer = make_trainer(config)
    step_to(trainer, 3)
    zeros = 0
    for parameter in ffn_parameters(trainer):
        for top in range(0, 24, 5):
            for left in range(0, 16, 5):
                block = parameter.value[top : top + 5, left : left + 5]
                assert block.all() or not block.any()
                zeros += not block.any()
    assert zeros > 0


def test_a_threshold_leaves_nothing_smaller(config):
    config = with_overrides(
        config, ["target_density=1", "sparse_from=0", "weight_threshold=0.01", "l1_warmup_steps=1"]
    )
    trainer = make_trainer(config)
    trainer.take_step()
    assert zero_fraction(trainer) == 0, "it warms up first"
    trainer.take_step()
    for parameter in ffn_parameters(trainer):
        left = parameter.value[parameter.value != 0]
        assert 0 < left.size < parameter.size
        assert np.abs(left).min() >= np.float32(0.01)


@pytest.mark.parametrize("overrides", [BLOCKS, ["l1_block=1e-6"]], ids=str)
def test_a_threshold_goes_by_the_root_mean_square_of_blocks(config, overrides):
    config = with_overrides(
        config,
        [
            "target_density=1",
            "sparse_from=0",
            "l1_warmup_steps=0",
            "weight_threshold=0.015",
            *overrides,
        ],
    )
    trainer = make_trainer(config)
    for ffn in trainer.model.ffn_layers:
        ffn.down.value *= 2  # they start smaller
    for parameter in ffn_parameters(trainer):
        parameter.value[5:10, :5] *= 0.3
    trainer.take_step()
    for parameter in ffn_parameters(trainer):
        blocks = [
            parameter.value[top : top + 5, left : left + 5]
            for top in range(0, 24, 5)
            for left in range(0, 16, 5)
        ]
        kept = [block for block in blocks if block.any()]
        assert 0 < len(kept) < len(blocks)
        assert all(np.sqrt(np.square(block).mean()) >= 0.015 for block in kept)
        assert min(np.abs(block).min() for block in kept) < 0.015


def test_without_settings_for_it_no_weight_becomes_zero(config):
    config = with_overrides(config, ["target_density=1", "sparse_from=0"])
    trainer = make_trainer(config)
    step_to(trainer, 3)
    assert zero_fraction(trainer) == 0
    assert trainer.state_dict()["weight_l1_strength"] is None


# ---------------------------------------------------------------------- the target density


@pytest.mark.parametrize("overrides", [[], BLOCKS, ["ffn=two_matrix"]], ids=str)
def test_the_target_is_reached_exactly_in_its_step(config, overrides):
    config = with_overrides(config, [*overrides, "sparse_from=0", "target_density_step=6"])
    trainer = make_trainer(config)
    b = config.weight_block_size
    step_to(trainer, 5)
    values = [parameter.value for parameter in ffn_parameters(trainer)]
    total = sum(value.size for value in values)
    assert sum(entries_left(value, b) for value in values) > 0.1 * total
    for step in (6, 7, 8):
        step_to(trainer, step)
        left = sum(entries_left(value, b) for value in values)
        assert 0.1 * total - b * b < left <= round(0.1 * total)


@pytest.mark.parametrize("overrides", [[], BLOCKS], ids=str)
def test_no_more_is_left_than_is_wanted_in_each_step(config, overrides):
    config = with_overrides(config, [*overrides, "sparse_from=0", "target_density_step=10"])
    trainer = make_trainer(config)
    b = config.weight_block_size
    for step in range(1, 13):
        trainer.take_step()
        wanted = weight_density(step, target=0.1, begin=2, end=10)
        values = [parameter.value for parameter in ffn_parameters(trainer)]
        left = sum(entries_left(value, b) for value in values)
        assert left <= round(wanted * sum(value.size for value in values))
        assert left > 0.09 * sum(value.size for value in values) - b * b


def test_the_strength_falls_while_less_is_left_than_is_wanted(config):
    """An L1 term so strong that it does by itself what is wanted, and more."""
    config = with_overrides(
        config, ["steps=100", "sparse_from=0", "target_density=0.5", "l1_weight=0.7"]
    )
    trainer = make_trainer(config)
    strengths, densities = [], []
    for _ in range(60):
        strengths.append(trainer.take_step().weight_l1_strength)
        densities.append(1 - zero_fraction(trainer))
    assert strengths[1] == 0.7
    assert min(strengths) < 0.5
    assert max(strengths) == 0.7
    wanted = weight_density(60, target=0.5, begin=2, end=100)
    assert wanted / 1.5 < densities[-1] <= wanted + 1e-3


def test_l1_weight_is_the_largest_strength_of_the_controller(config):
    assert WeightSparsity(with_overrides(config, ["l1_weight=0.7"])).strength == 0.7
    assert WeightSparsity(config).strength == TARGET_STRENGTH
    assert WeightSparsity(with_overrides(config, BLOCKS)).strength == TARGET_BLOCK_STRENGTH


# ---------------------------------------------------------------------- nothing left


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["l1_weight=1000"], "try a smaller l1_weight"),
        (["l1_block=1000"], "try a smaller l1_block"),
        (["weight_threshold=100"], "try a smaller weight_threshold"),
        (["weight_threshold=100", *BLOCKS], "try a smaller weight_threshold"),
        (["weight_threshold=100", "l1_weight=0.1"], "smaller weight_threshold or l1_weight"),
        (["weight_threshold=100", "l1_block=0.1"], "smaller weight_threshold or l1_block"),
        (["weight_threshold=0.01", "l1_weight=1000"], "try a smaller l1_weight"),
        (["weight_threshold=0.01", "l1_block=1000"], "try a smaller l1_block"),
        (["target_density=0.1", "l1_weight=1000"], "try a smaller l1_weight"),
        (["target_density=0.1", "l1_block=1000"], "try a smaller l1_block"),
        (["target_density=0.1", "weight_threshold=100"], "try a smaller weight_threshold"),
    ],
)
def test_a_weight_without_an_entry_stops_the_run_in_one_line(tmp_path, config, overrides, advice):
    config = with_overrides(
        config, ["target_density=1", "sparse_from=0", "checkpoint_interval=2", *overrides]
    )
    run = tmp_path / "run"
    with pytest.raises(TwellError) as caught:
        quiet_train(config, run)
    message = str(caught.value)
    assert "\n" not in message
    assert "no weight of model.layers.0.mlp.gate_proj.weight is left but zeros" in message
    assert message.endswith(advice)
    kept = RunFolder(run)
    if kept.path.exists():
        step, checkpoint = kept.latest_checkpoint()
        model, _ = load_model(checkpoint)
        assert all(ffn.weight_density > 0 for ffn in model.ffn_layers)


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["l1_weight=1"], "try a smaller l1_weight"),
        ([], "try l1_weight below 0.1, its value with a target_density"),
        (BLOCKS, "try l1_block below 0.01, its value with a target_density"),
    ],
    ids=str,
)
def test_a_controller_that_empties_one_weight_is_stopped(config, overrides, advice):
    config = with_overrides(config, overrides)
    trainer = make_trainer(config)
    small = trainer.model.ffn_layers[1].down
    step_to(trainer, 5)
    small.value[...] = 1e-6
    trainer.optimizer.first_moment[small.name][...] = 0
    small.grad_buffer = lambda: np.zeros_like(small.value)
    trainer.weight_sparsity = WeightSparsity(config)
    with pytest.raises(StepFailed, match=f"step 6: no weight of {small.name}") as caught:
        trainer.take_step()
    assert caught.value.advice == advice


# ---------------------------------------------------------------------- frozen zeros


@pytest.mark.parametrize("overrides", [[], BLOCKS, ["ffn=two_matrix"]], ids=str)
def test_from_sparse_from_on_only_stored_entries_are_held_and_trained(config, overrides):
    config = with_overrides(config, overrides)
    trainer = make_trainer(config)
    step_to(trainer, 7)
    dense_bytes = moment_bytes(trainer)
    assert trainer.model.weight_format == "dense"
    trainer.take_step()
    assert trainer.model.weight_format == trainer.model.config.ffn_weight_format
    assert trainer.model.weight_format == config.sparse_format
    patterns = {}
    for parameter in ffn_parameters(trainer):
        assert isinstance(parameter, SparseParameter)
        assert trainer.parameters[parameter.name] is parameter
        for moments in (trainer.optimizer.first_moment, trainer.optimizer.second_moment):
            assert moments[parameter.name].shape == parameter.value.shape
        patterns[parameter.name] = parameter.matrix.to_dense() != 0
    assert moment_bytes(trainer) < 0.7 * dense_bytes
    before = {name: parameter.value.copy() for name, parameter in trainer.parameters.items()}
    result = step_to(trainer, 12)
    assert result.weight_l1_strength == 0
    assert set(result.statistics.paths) == {config.sparse_format}
    for name, parameter in trainer.parameters.items():
        assert (parameter.value != before[name]).any(), name
    for parameter in ffn_parameters(trainer):
        dense = parameter.matrix.to_dense()
        outside = ~patterns[parameter.name]
        if config.sparse_format == "csr":
            assert not dense[outside].any()
        assert parameter.matrix.nnz <= 0.9 * parameter.size


@pytest.mark.parametrize("overrides", [[], BLOCKS], ids=str)
def test_the_first_sparse_step_is_the_dense_one_at_the_stored_entries(config, overrides):
    """The same weights, moments and batch, in the dense layer and in the sparse one."""
    config = with_overrides(config, overrides)
    sparse, dense = make_trainer(config), make_trainer(config)
    step_to(sparse, 8)
    step_to(dense, 7)
    dense.config = dataclasses.replace(config, sparse_from=0)
    step_to(dense, 8)
    dense.weight_sparsity = WeightSparsity(
        dataclasses.replace(config, target_density=1.0, sparse_from=0)
    )
    step_to(sparse, 9)
    step_to(dense, 9)
    for parameter, whole in zip(ffn_parameters(sparse), ffn_parameters(dense), strict=True):
        expected = at_stored_entries(parameter.matrix, whole.value)
        np.testing.assert_allclose(parameter.value, expected, rtol=1e-4, atol=1e-6)
    for name in sparse.parameters.keys() - {parameter.name for parameter in ffn_parameters(dense)}:
        np.testing.assert_allclose(
            sparse.parameters[name].value, dense.parameters[name].value, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("shape", [(24, 16), (7, 5), (5, 10)])
def test_entries_are_gathered_in_the_order_in_which_a_format_stores_them(rng, shape):
    pattern = np.where(rng.random(shape) < 0.2, rng.standard_normal(shape), 0)
    for matrix in (
        CSRMatrix.from_dense(pattern),
        BlockELLMatrix.from_dense(pattern, block_size=4),
    ):
        np.testing.assert_array_equal(at_stored_entries(matrix, pattern), matrix.stored_values)
        other = rng.standard_normal(shape)
        gathered = matrix.with_values(at_stored_entries(matrix, other)).to_dense()
        rows, columns, _ = matrix.coordinates()
        expected = np.zeros(shape)
        expected[rows, columns] = other[rows, columns]
        np.testing.assert_array_equal(gathered, expected)


def test_moments_keep_their_values(config):
    trainer = make_trainer(with_overrides(config, ["sparse_from=0", "target_density_step=8"]))
    step_to(trainer, 8)
    name = "model.layers.0.mlp.up_proj.weight"
    value = trainer.parameters[name].value.copy()
    moment = trainer.optimizer.first_moment[name].copy()
    freeze_zeros(trainer.model, trainer.optimizer, "csr", 16)
    np.testing.assert_array_equal(trainer.optimizer.first_moment[name], moment[value != 0])


def test_compiling_changes_nothing(config):
    trainer = make_trainer(config)
    before = {name: parameter.value.copy() for name, parameter in trainer.parameters.items()}
    trainer.weight_sparsity.compile(trainer.model.dtype)
    for weight_format in ("csr", "block_ell"):
        compile_sparse_path(trainer.model, weight_format, config.block_size, 16)
    assert trainer.model.weight_format == "dense"
    for name, parameter in trainer.model.parameters().items():
        assert type(parameter) is Parameter
        assert parameter.grad is None
        np.testing.assert_array_equal(parameter.value, before[name])


def test_what_is_compiled_on_is_sparse(config):
    layer = make_trainer(config).model.ffn_layers[0]
    thinned = thinned_copy(layer)
    assert 0 < thinned.weight_density < 0.05
    assert layer.weight_density == 1


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("overrides", [[], BLOCKS], ids=str)
def test_a_run_reports_and_saves_what_is_left(tmp_path, config, overrides):
    config = with_overrides(config, overrides)
    run = tmp_path / "run"
    summary = quiet_train(config, run)
    total = 2 * 3 * 24 * 16
    b = config.weight_block_size
    assert 0.9 <= summary["ffn_weight_sparsity"] < 0.9 + b * b / total + 1e-9
    rows = RunFolder(run).read_metrics()
    for row in rows:
        density = row["ffn_weight_density"]
        assert list(density) == ["gate_proj", "up_proj", "down_proj"]
        assert all(len(by_layer) == 2 for by_layer in density.values())
        is_sparse = row["step"] >= config.sparse_from
        assert row["ffn_weight_format"] == (config.sparse_format if is_sparse else "dense")
        assert (row["weight_l1_strength"] > 0) == (row["step"] <= config.sparse_from)
        mean = np.mean(list(density.values()))
        assert mean > 0.09 if not is_sparse else mean <= 0.1
        if not is_sparse:
            assert row["ffn_weight_bytes"] == total * 4
    assert rows[-1]["ffn_weight_bytes"] < total * 4
    assert set(rows[-1]["ffn_paths"]) == {config.sparse_format}
    checkpoint = RunFolder(run).checkpoint_path(12)
    assert json.loads((checkpoint / "config.json").read_text())["ffn_weight_format"] == (
        config.sparse_format
    )
    model, _ = load_model(checkpoint, keep_format=True)
    held = weight_statistics(model, b)
    assert held["ffn_weight_density"] == rows[-1]["ffn_weight_density"]
    moments = read_tensors(checkpoint / "optimizer.safetensors")
    for parameter in (parameter for ffn in model.ffn_layers for parameter in ffn.parameters()):
        assert moments[f"first_moment.{parameter.name}"].shape == parameter.value.shape


class Notes(Reporter):
    """Collects the lines that a run shows by the way."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


@pytest.mark.parametrize("sparse_format", ["csr", "block_ell"])
@pytest.mark.parametrize(("density", "notes"), [(0.3, 1), (0.08, 0)])
def test_zeros_too_few_to_be_faster_are_noted_once(tmp_path, config, sparse_format, density, notes):
    overrides = [f"sparse_format={sparse_format}", f"target_density={density}"]
    report = Notes()
    quiet_train(with_overrides(config, overrides), tmp_path / "run", report=report)
    assert len(report.lines) == notes
    for line in report.lines:
        assert f"FFN weights are left, as {sparse_format}, which is slower than dense" in line
        assert "\n" not in line


@pytest.mark.parametrize("stops", [[3], [7], [8], [9], [4, 8, 11]], ids=str)
@pytest.mark.parametrize("overrides", [[], BLOCKS], ids=str)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, config, overrides, stops):
    """Before zeros are frozen, in the step that freezes them, and after it."""
    config = with_overrides(config, overrides)
    quiet_train(config, tmp_path / "whole")
    run = tmp_path / "run"
    for number, stop in enumerate(stops):
        with pytest.raises(Interrupted):
            quiet_train(None if number else config, run, number > 0, Stop(stop))
    quiet_train(None, run, resume=True)
    assert outcome(run) == outcome(tmp_path / "whole")


def test_a_sparse_run_is_not_resumed_with_other_settings(tmp_path, config):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        quiet_train(config, run, report=Stop(9))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for override in (
        "sparse_format=block_ell",
        "target_density=0.2",
        "sparse_from=9",
        "block_size=4",
        "target_density_step=7",
    ):
        with pytest.raises(UsageError, match="given to resume a run with") as caught:
            quiet_train(with_overrides(config, [override]), run, resume=True)
        assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    quiet_train(None, run, resume=True)


def test_a_checkpoint_in_another_format_than_its_step_calls_for_is_refused(tmp_path, config):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        quiet_train(config, run, report=Stop(9))
    checkpoint = RunFolder(run).checkpoint_path(9)
    model, tokenizer = load_model(checkpoint, ffn_path="dense")
    save_model(checkpoint, model, tokenizer)
    path = checkpoint / "training_state.json"
    state = json.loads(path.read_text())
    state["files"]["model.safetensors"] = file_checksum(checkpoint / "model.safetensors")
    path.write_text(json.dumps(state))
    with pytest.raises(TwellError, match="ffn_weight_format='dense', but it was trained with"):
        quiet_train(None, run, resume=True)


@pytest.mark.parametrize("value", [None, {}, [], "0.1", 1, -0.1, 0.0, 0.2, True])
def test_a_damaged_controller_is_refused_in_one_line(tmp_path, config, value):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        quiet_train(config, run, report=Stop(4))
    path = RunFolder(run).checkpoint_path(4) / "training_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_l1_strength": value}))
    with pytest.raises(TwellError, match="training_state.json is damaged") as caught:
        quiet_train(None, run, resume=True)
    assert "\n" not in str(caught.value)


def test_a_finished_run_goes_on_with_what_it_has(tmp_path, config):
    run = tmp_path / "run"
    quiet_train(config, run)
    summary = quiet_train(with_overrides(config, ["steps=14"]), run, resume=True)
    assert summary["steps"] == 14
    assert summary["ffn_weight_sparsity"] >= 0.9
    with pytest.raises(UsageError, match="sparse_from=8 given, at most steps=7"):
        quiet_train(with_overrides(config, ["steps=7"]), run, resume=True)
