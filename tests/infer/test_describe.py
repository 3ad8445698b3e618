"""Descriptions of checkpoints and saved matrices, from their files alone."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.formats import HybridELLMatrix, SparseMatrix, TwELLMatrix
from twell_numba.infer.describe import (
    describe_checkpoint,
    describe_matrix,
    row_length_histogram,
)
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=256, d_model=8, d_ffn=24, n_layers=2, n_heads=2, n_kv_heads=1, context_length=16
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save_model(folder, Transformer(CONFIG, np.random.default_rng(0)), ByteTokenizer())
    return folder


def test_a_checkpoint_is_described_by_its_tensors(checkpoint: Path) -> None:
    description = describe_checkpoint(checkpoint)
    assert description["config"] == vars(CONFIG)
    assert description["parameters"] == CONFIG.parameter_count()
    assert description["bytes"] == 4 * CONFIG.parameter_count()
    shapes = {tensor["name"]: tensor["shape"] for tensor in description["tensors"]}
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [8, 24]
    assert description["step"] is None
    assert description["resumable"] is False


@pytest.mark.parametrize("weight_format", ["dense", "csr", "block_ell"])
def test_zeros_bytes_and_format_of_each_layer_are_described(
    tmp_path: Path, weight_format: str
) -> None:
    model = Transformer(CONFIG, np.random.default_rng(0))
    gate, up, down = (parameter.value for parameter in model.ffn_layers[1].parameters())
    gate[:, 1:] = 0  # one block column of two
    up[:12] = -0.0
    model.hold_ffn_weights(weight_format, 4)
    save_model(tmp_path, model, ByteTokenizer())
    first, second = describe_checkpoint(tmp_path)["ffn_layers"]
    assert first["format"] == second["format"] == weight_format
    assert first["weights"] == first["nonzeros"] == 3 * 24 * 8
    assert first["density"] == 1
    assert second["nonzeros"] == 24 + 12 * 8 + 24 * 8
    assert second["density"] == pytest.approx(312 / 576)
    assert second["density_by_matrix"] == {"gate_proj": 1 / 8, "up_proj": 1 / 2, "down_proj": 1}
    assert first["dense_bytes"] == second["dense_bytes"] == 4 * 576
    parts = [parameter.operand for parameter in model.ffn_layers[1].parameters()]
    if weight_format != "block_ell":
        assert second["bytes"] == sum(part.nbytes for part in parts)
    else:  # values of 6 + 6 + 12 blocks, and 6 rows of block columns for each matrix
        assert second["bytes"] == 4 * (16 * (6 + 6 + 12) + 6 * (1 + 2 + 2))


def test_weights_that_cannot_be_counted_are_described_all_the_same(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    write_raw = {"dtype": "F8_E4M3", "shape": [24, 8], "data_offsets": [0, 192]}
    header = json.dumps({name: write_raw}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(192))
    first, second = describe_checkpoint(checkpoint)["ffn_layers"]
    assert first["nonzeros"] is first["density"] is None
    assert first["density_by_matrix"]["up_proj"] is None
    assert first["bytes"] == first["dense_bytes"] == 192
    assert second["nonzeros"] is None
    assert second["bytes"] == 0


def test_training_state_is_described(checkpoint: Path) -> None:
    (checkpoint / "training_state.json").write_text(json.dumps({"step": 7}))
    assert describe_checkpoint(checkpoint)["step"] == 7
    assert describe_checkpoint(checkpoint)["resumable"] is False
    (checkpoint / "optimizer.safetensors").touch()
    assert describe_checkpoint(checkpoint)["resumable"] is True


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"step": null}', '{"step": 1e999}', "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_a_damaged_training_state_is_named(checkpoint: Path, content: str) -> None:
    (checkpoint / "training_state.json").write_text(content)
    with pytest.raises(TwellError, match="training_state.json is damaged"):
        describe_checkpoint(checkpoint)


def test_a_description_of_too_many_layers_is_refused_at_once(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9}))
    with pytest.raises(TwellError, match="n_layers=1000000000 given, at most"):
        describe_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.json"])
def test_files_that_may_not_be_read_are_named(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "training_state.json").write_text(json.dumps({"step": 7}))
    real_open = io.open

    def ask(path: object, *arguments: Any, **more: Any) -> Any:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, *arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", ask)
    with pytest.raises(TwellError, match=f"{name}: Permission denied; get permission"):
        describe_checkpoint(checkpoint)


def test_truncated_weights_are_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(TwellError, match="model.safetensors cannot be read"):
        describe_checkpoint(checkpoint)


@pytest.mark.parametrize("format_class", [TwELLMatrix, HybridELLMatrix])
def test_a_matrix_is_described(tmp_path: Path, format_class: type[SparseMatrix]) -> None:
    dense = np.zeros((5, 300), np.float32)
    dense[0, :3] = 1
    dense[1, 299] = np.nan
    dense[2, :] = 2  # into the tail
    path = tmp_path / "matrix.safetensors"
    matrix = format_class.from_dense(dense)
    matrix.save(path)
    description = describe_matrix(path)
    assert description["format"] == format_class.__name__
    assert description["shape"] == [5, 300]
    assert description["nonzeros"] == 3 + 1 + 300
    assert description["density"] == pytest.approx(304 / 1500)
    assert description["dense_bytes"] == dense.nbytes
    assert description["bytes"] == matrix.nbytes
    rows = {part["low"]: part["rows"] for part in description["row_lengths"] if part["rows"]}
    assert rows == {0: 2, 1: 1, 2: 1, 256: 1}


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], []),
        ([0], [(0, 0, 1)]),
        ([0, 1, 2, 3, 4], [(0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 1)]),
        ([8], [(0, 0, 0), (1, 1, 0), (2, 3, 0), (4, 7, 0), (8, 15, 1)]),
    ],
)
def test_rows_are_counted_by_length(lengths: list[int], bins: list[tuple[int, int, int]]) -> None:
    histogram = row_length_histogram(np.array(lengths, np.int64))
    assert [tuple(part.values()) for part in histogram] == bins
