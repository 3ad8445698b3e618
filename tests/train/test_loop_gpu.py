"""Whole runs on a GPU, emulated or real."""

import json

import numpy as np
import pytest

import twell_numba.device.gpu
from twell_numba.errors import UsageError
from twell_numba.formats.tensor_file import read_tensors
from twell_numba.infer.evaluate import evaluate
from twell_numba.infer.generate import generate
from twell_numba.models.checkpoint import load_model
from twell_numba.train.batches import validation_windows
from twell_numba.train.config import from_settings, with_overrides
from twell_numba.train.loop import load_corpus, train
from twell_numba.train.report import Reporter
from twell_numba.train.run_folder import RunFolder
from twell_numba.train.sparsify import sparsify_settings

SMALL = {
    "steps": 4,
    "d_model": 8,
    "d_ffn": 8,
    "n_layers": 1,
    "n_heads": 1,
    "context_length": 4,
    "batch_size": 1,
    "learning_rate": 1e-2,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_batches": 2,
    "sample_interval": 4,
    "sample_prompt": "a",
    "sample_tokens": 3,
    "checkpoint_interval": 2,
    "ffn_path": "dense",
}


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abracadabra " * 200)
    return from_settings(SMALL | {"data": str(text)})


@pytest.fixture
def gpu_of(machine, monkeypatch):
    monkeypatch.setattr(twell_numba.device.gpu, "choose", lambda device: machine.gpu)
    return machine.gpu


def quiet(config, run, device="cuda", **options):
    return train(config, run, report=Reporter(), device=device, **options)


def test_a_run_ends_as_on_the_cpu(config, gpu_of, tmp_path):
    on_cpu, on_gpu = quiet(config, tmp_path / "cpu", "cpu"), quiet(config, tmp_path / "gpu")
    assert on_gpu["device"] == "cuda:0"
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=1e-4)
    rows = [RunFolder(tmp_path / name).read_metrics() for name in ("cpu", "gpu")]
    for expected, actual in zip(*rows, strict=True):
        assert actual.keys() == expected.keys()
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    folder = RunFolder(tmp_path / "gpu").latest_checkpoint()[1]
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"

    model, tokenizer = load_model(folder, device="cuda", ffn_path="dense")
    reference, _ = load_model(folder, ffn_path="dense")
    windows = validation_windows(load_corpus(config).validation, 4, 2)
    measured = [evaluate(each, windows, tokenizer) for each in (model, reference)]
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], rel=1e-5)
    texts = [
        "".join(generate(each, tokenizer, "a", max_new_tokens=3, temperature=0.0))
        for each in (model, reference)
    ]
    assert texts[0] == texts[1]


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(config, gpu_of, tmp_path):
    config = with_overrides(config, ["sample_interval=0", "eval_interval=0"])
    tensors = []
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for part, last in enumerate(steps):
            # the schedule of the whole run, whatever the step it is stopped at
            quiet(
                with_overrides(config, [f"steps={last}", "minimum_learning_rate_fraction=1"]),
                tmp_path / name,
                resume=part > 0,
            )
        folder = RunFolder(tmp_path / name).latest_checkpoint()[1]
        tensors.append(
            {
                (file, name): tensor
                for file in ("model.safetensors", "optimizer.safetensors")
                for name, tensor in read_tensors(folder / file).items()
            }
        )
    whole, parts = tensors
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name], tensor, err_msg=str(name))


def test_a_model_is_made_sparse_as_on_the_cpu(config, gpu_of, tmp_path):
    silu = with_overrides(config, ["activation=silu", "sample_interval=0", "eval_interval=0"])
    quiet(silu, tmp_path / "silu", "cpu")
    overrides = [f'data="{config.data}"', "steps=2", "batch_size=1", "eval_batches=2"]
    overrides += ["eval_interval=0", "learning_rate=1e-2", "ffn_path=dense"]
    sparse = sparsify_settings(tmp_path / "silu", overrides)
    on_cpu = quiet(sparse, tmp_path / "on cpu", "cpu")
    on_gpu = quiet(sparse, tmp_path / "on gpu")
    assert on_gpu["device"] == "cuda:0"
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=1e-4)
    for name in ("source", "switched"):
        expected, actual = (each["before"][name] for each in (on_cpu, on_gpu))
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert actual["nonzeros_per_token"] == expected["nonzeros_per_token"]


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_auto_takes_what_there_is_for_an_activation(config, gpu_of, tmp_path, activation):
    overrides = [f"activation={activation}", "ffn_path=auto", "sample_interval=0", "steps=1"]
    summary = quiet(with_overrides(config, overrides), tmp_path / "run")
    assert np.isfinite(summary["loss"])


def test_a_path_that_there_is_on_the_cpu_alone_is_refused(config, gpu_of, tmp_path):
    config = with_overrides(config, ["activation=relu2", "ffn_path=twell"])
    with pytest.raises(UsageError, match="ffn_path=twell given with activation=relu2 on a GPU"):
        quiet(config, tmp_path / "run")
