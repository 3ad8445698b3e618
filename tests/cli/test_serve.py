"""``twell serve``: its options, and what it refuses before it starts."""

import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer


def serve(*arguments: object) -> Result:
    words = ["serve", *map(str, arguments)]
    return CliRunner().invoke(twell, words, prog_name="twell", env={"TWELL_API_KEY": None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ModelConfig(
        vocab_size=256, d_model=16, d_ffn=16, n_layers=1, n_heads=2, n_kv_heads=2,
        context_length=32,
    )  # fmt: skip
    save_model(tmp_path / "model", Transformer(config, np.random.default_rng(0)), ByteTokenizer())
    return tmp_path / "model"


def error_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    assert "Traceback" not in result.stderr
    return line


@pytest.mark.parametrize(
    "options",
    [
        ("--port", 70_000),
        ("--port", -1),
        ("--port", "http"),
        ("--timeout", 0),
        ("--timeout", -1),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
        ("--max-sequences", 0),
        ("--cache-tokens", 0),
        ("--cache-tokens", 10**20),
        ("--chat-tokens", 0),
        ("--queue", -1),
        ("--max-request-bytes", 0),
        ("--seed", -1),
        ("--api-key", ""),
        ("--api-key", "two words"),
        ("--api-key", "ключ"),
        ("--api-key", "line\n"),
        ("--host", "192.0.2.1"),  # of no machine
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_option(folder: Path, options: object) -> None:
    option, value = options  # type: ignore[misc]
    line = error_line(serve(folder, "--port", 0, option, value), 2)
    assert option in line


def test_a_cache_too_small_for_anything_is_refused(folder: Path) -> None:
    line = error_line(serve(folder, "--port", 0, "--cache-tokens", 3), 2)
    assert "cache-tokens 3 given" in line


def test_a_port_in_use_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = error_line(serve(tmp_path / "no-such-model", "--port", port), 2)
    assert f"--port {port} given" in line
    assert "in use" in line
    assert "--port 0 for a free one" in line


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "no-such-model" in error_line(serve(tmp_path / "no-such-model", "--port", 0), 1)


def test_a_server_open_to_others_without_a_key_warns(tmp_path: Path) -> None:
    # There is no model, so nothing ever listens.
    def lines(*options: object) -> list[str]:
        result = serve(tmp_path / "none", "--port", 0, *options)
        return [line for line in result.stderr.splitlines() if line.startswith("Warning")]

    (line,) = lines("--host", "0.0.0.0")
    assert "--api-key" in line
    assert lines("--host", "0.0.0.0", "--api-key", "secret") == []
    assert lines() == lines("--host", "localhost") == []


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = error_line(serve(folder, "--port", 0), 1)
    assert package in line
    assert "pip install 'twell_numba[serve]'" in line
