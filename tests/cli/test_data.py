"""``twell data``."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.transformer import Transformer
from twell_numba.train.prepared import open_prepared, same_tokenizer
from twell_numba.train.tokenizer import train_bpe


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(twell, ["data", *map(str, arguments)], prog_name="twell")


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    return path


def test_a_prepared_file_is_described_as_it_was_made(tmp_path: Path) -> None:
    source, destination = write_text(tmp_path), tmp_path / "text.bin"
    made = invoke("prepare", source, destination, "--json")
    assert made.exit_code == 0
    described = invoke("info", destination, "--json")
    assert json.loads(described.stdout) == json.loads(made.stdout)
    description = json.loads(made.stdout)
    tokens = description["training_tokens"] + description["validation_tokens"]
    assert tokens == description["bytes"] == source.stat().st_size


def test_text_is_described_with_its_held_out_part(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    description = json.loads(invoke("info", source, "--json").stdout)
    size = source.stat().st_size
    assert description["files"] == 1
    assert description["bytes"] == size
    assert description["training_bytes"] + description["validation_bytes"] == size
    table = invoke("info", source).stdout
    assert f"{size:,}" in table


def test_a_prepared_file_is_never_overwritten(tmp_path: Path) -> None:
    source, destination = write_text(tmp_path), tmp_path / "text.bin"
    destination.write_text("precious")
    result = invoke("prepare", source, destination)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert destination.read_text() == "precious"


def test_missing_data_is_one_line(tmp_path: Path) -> None:
    result = invoke("info", tmp_path / "missing")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: no data at {tmp_path / 'missing'}")


def test_a_vocabulary_far_too_large_is_one_line(tmp_path: Path) -> None:
    destination = tmp_path / "text.bin"
    arguments = ["prepare", write_text(tmp_path), destination, "--tokenizer", "bpe"]
    result = invoke(*arguments, "--bpe-vocab-size", 10**15)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "--bpe-vocab-size" in line
    assert not destination.exists()


@pytest.mark.parametrize("option", [("--tokenizer", "byte"), ("--bpe-vocab-size", 300)])
def test_two_tokenizers_are_refused(tmp_path: Path, option: tuple[str, object]) -> None:
    destination = tmp_path / "x.bin"
    options = (*option, "--tokenizer-of", tmp_path / "model")
    result = invoke("prepare", write_text(tmp_path), destination, *options)
    assert result.exit_code == 2
    assert f"{option[0]} {option[1]} given with --tokenizer-of" in result.stderr
    assert not destination.exists()


def test_a_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_bpe(["some text to learn from\n"] * 40, 270)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=8,
        d_ffn=16,
        n_layers=1,
        n_heads=2,
        n_kv_heads=2,
        context_length=8,
    )
    model = Transformer(config, np.random.default_rng(0))
    save_model(tmp_path / "model", model, tokenizer)
    destination = tmp_path / "text.bin"
    result = invoke(
        "prepare", write_text(tmp_path), destination, "--tokenizer-of", tmp_path / "model"
    )
    assert result.exit_code == 0, result.output
    assert same_tokenizer(open_prepared(destination).tokenizer, tokenizer)
