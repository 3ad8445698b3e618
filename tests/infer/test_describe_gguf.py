"""Descriptions of GGUF files, by the same names as those of folders."""

from pathlib import Path

import numpy as np
import pytest

from twell_numba.infer.describe import describe_checkpoint
from twell_numba.models.checkpoint import load_config, save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_writer import write_gguf
from twell_numba.models.tokenizer import ByteTokenizer, load_tokenizer
from twell_numba.models.transformer import Transformer

pytest.importorskip("gguf")

CONFIG = ModelConfig(
    vocab_size=256, d_model=32, d_ffn=64, n_layers=2, n_heads=2, n_kv_heads=1, context_length=16
)


def model() -> Transformer:
    model = Transformer(CONFIG, np.random.default_rng(0))
    model.ffn_layers[1].parameters()[0].value[:16] = 0
    return model


def test_a_file_is_described_as_the_folder_is(tmp_path: Path) -> None:
    save_model(tmp_path / "folder", model(), ByteTokenizer())
    write_gguf(tmp_path / "model.gguf", model(), ByteTokenizer())
    folder = describe_checkpoint(tmp_path / "folder")
    file = describe_checkpoint(tmp_path / "model.gguf")
    assert file.keys() == folder.keys()
    for key in ("config", "parameters", "bytes", "ffn_layers", "step", "resumable"):
        assert file[key] == folder[key], key
    assert file["missing_tensors"] == []
    assert file["ffn_layers"][1]["density_by_matrix"]["gate_proj"] == 0.75
    shapes = {tensor["name"]: tensor["shape"] for tensor in file["tensors"]}
    assert shapes["blk.1.ffn_down.weight"] == [32, 64]


def test_bytes_are_those_of_the_type(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", model(), ByteTokenizer(), "q8_0")
    description = describe_checkpoint(tmp_path / "model.gguf")
    assert {tensor["dtype"] for tensor in description["tensors"]} == {"F32", "Q8_0"}
    assert description["ffn_layers"][0]["bytes"] == 3 * 32 * 64 // 32 * 34


def test_config_and_tokenizer_are_read_without_the_weights(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", model(), ByteTokenizer())
    assert load_config(tmp_path / "model.gguf") == CONFIG
    assert isinstance(load_tokenizer(tmp_path / "model.gguf"), ByteTokenizer)
