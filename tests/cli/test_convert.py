"""``twell convert`` on the command line, and what the other commands make of its results."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from twell_numba.cli import twell
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=256, d_model=32, d_ffn=64, n_layers=2, n_heads=2, n_kv_heads=1, context_length=32
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(twell, list(map(str, arguments)), prog_name="twell")


def converted(*arguments: object) -> dict:
    result = invoke("convert", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} of some text\n" for number in range(500)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which ten neurons of each layer cannot fire."""
    model = Transformer(CONFIG, np.random.default_rng(0))
    for ffn in model.ffn_layers:
        gate, up, down = (parameter.value for parameter in ffn.parameters())
        gate *= 5
        up *= 5
        down *= 20
        gate[:10] = 0
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, model, ByteTokenizer())
    return folder


@pytest.mark.parametrize("weight_format", ["csr", "block-ell"])
def test_every_command_takes_the_result(
    source: Path, text: Path, tmp_path: Path, weight_format: str
) -> None:
    sparse = tmp_path / "sparse"
    blocks = ["--block-size", 4, "--per-layer"] if weight_format == "block-ell" else []
    options = ["--target-density", 0.05, "--data", text, "--windows", 4]
    report = converted(source, sparse, "--to", weight_format, *blocks, *options)
    name = weight_format.replace("-", "_")
    assert report["format"] == name

    description = json.loads(invoke("inspect", sparse, "--json").stdout)
    assert description["config"]["ffn_weight_format"] == name
    for layer, described in zip(report["layers"], description["ffn_layers"], strict=True):
        assert described["format"] == name
        assert described["density"] == layer["density_after"]
        assert described["nonzeros"] == round(described["density"] * 3 * 64 * 32)
        assert described["bytes"] == layer["ffn_bytes_after"]
        assert described["dense_bytes"] == layer["ffn_bytes_before"] == 3 * 64 * 32 * 4
    table = invoke("inspect", sparse).stdout
    assert f"{name} " in table
    assert f"{1 - description['ffn_layers'][0]['density']:.2%}" in table

    measured = {}
    for path in ("auto", "dense", "twell", "csr", "block_ell"):
        result = invoke("eval", sparse, *options[2:], "--ffn-path", path, "--json")
        assert result.exit_code == 0, result.output
        measured[path] = json.loads(result.stdout)
        assert measured[path]["loss"] == pytest.approx(report["loss_after"], rel=1e-5)
        sparsity = 1 - np.mean([layer["density_after"] for layer in report["layers"]])
        assert measured[path]["ffn_weight_sparsity"] == pytest.approx(sparsity)
        counts = measured[path]["nonzeros_per_token"]
        assert counts == pytest.approx(measured["auto"]["nonzeros_per_token"], rel=1e-2)

    texts = {
        invoke(
            "generate", sparse, "--prompt", "line ", "--max-new-tokens", 9, "--temperature", 0,
            "--ffn-path", path,
        ).stdout
        for path in measured
    }  # fmt: skip
    assert len(texts) == 1
    assert texts.pop().startswith("line ")


def test_the_report_as_a_table(source: Path, text: Path, tmp_path: Path) -> None:
    result = invoke(
        "convert", source, tmp_path / "new", "--remove-dead", "--data", text, "--windows", 17
    )
    assert result.exit_code == 0, result.output
    assert "Measuring 17 sequences of 32 tokens of" in result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "written", "format", "all", "FFN", "neurons", "loss", "layer", "0", "1",
    ]  # fmt: skip
    share = json.loads(invoke("inspect", tmp_path / "new", "--json").stdout)["config"]["d_ffn"] / 64
    assert f"which is {share:.2%}" in lines[3]
    assert "as many in all layers:" in lines[4]
    assert "neurons that fire" in result.stdout
    result = invoke("convert", source, tmp_path / "sparse", "--to", "csr", "--device", "cuda")
    assert "neurons" not in result.stdout
    assert "loss" not in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "nothing to change given"),
        (["--to", "coo"], 2, "'coo' is not one of 'csr', 'block-ell', 'dense'"),
        (["--to", "csr", "--target-density", "0"], 2, "--target-density 0 given"),
        (["--to", "csr", "--target-density", "1.5"], 2, "above 0 and at most 1 wanted"),
        (["--to", "csr", "--target-density", "few"], 2, "'few' is not a valid float"),
        (["--to", "csr", "--weight-threshold", "-1"], 2, "--weight-threshold -1 given"),
        (["--to", "csr", "--weight-threshold", "1e9"], 1, "would leave nothing of"),
        (["--to", "csr", "--target-density", "1e-9"], 1, "would leave less than one weight"),
        (["--to", "block-ell", "--block-size", "33"], 2, "give --block-size 32 or less"),
        (["--to", "csr", "--block-size", "8"], 2, "--block-size given without --to block-ell"),
        (["--to", "dense"], 1, "is dense already"),
        (["--remove-dead"], 2, "--remove-dead given without --data"),
        (["--remove-dead", "--data", "missing.txt"], 1, "missing.txt"),
        (["--to", "csr", "--windows", "3"], 2, "--windows given without --data"),
    ],
)
def test_bad_requests_are_one_line_and_write_nothing(
    source: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    result = invoke("convert", source, tmp_path / "new", *options)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("Measuring")]
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_bad_places_are_one_line(source: Path, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    converted(source, sparse, "--to", "csr")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for arguments, code, message in (
        ((tmp_path / "missing", tmp_path / "new", "--to", "csr"), 1, "missing does not exist"),
        ((source, sparse, "--to", "csr"), 1, "exists already"),
        ((source, "", "--to", "csr"), 2, "destination '' given, a folder wanted"),
        (("", tmp_path / "new", "--to", "csr"), 1, "'' given, the folder of a run or a checkpoint"),
        ((sparse, tmp_path / "new", "--to", "csr"), 1, "convert it with --to dense first"),
        ((sparse, tmp_path / "new", "--target-density", 0.1), 1, "sparse already, stored as csr"),
    ):
        result = invoke("convert", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        (line,) = result.stderr.splitlines()
        assert message in line
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_inspection_of_a_file_that_lacks_a_tensor_says_so(source: Path, tmp_path: Path) -> None:
    converted(source, tmp_path / "sparse", "--to", "csr")
    complete = invoke("inspect", tmp_path / "sparse")
    assert complete.stderr == ""
    path = tmp_path / "sparse" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight.csr.data"
    for each in (name, "model.norm.weight"):
        del tensors[each]
    save_file(tensors, path)
    result = invoke("inspect", tmp_path / "sparse")
    assert result.exit_code == 0
    assert "unknown" in result.stdout
    (line,) = result.stderr.splitlines()
    assert f"lacks {name} (2 in all), without which" in line
    description = json.loads(invoke("inspect", tmp_path / "sparse", "--json").stdout)
    assert description["missing_tensors"] == [name, "model.norm.weight"]


def test_inspection_of_weights_that_cannot_be_counted_says_so(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    # As many bytes as before, which stand for another dtype.
    header["model.layers.1.mlp.up_proj.weight"] |= {"dtype": "F8_E4M3", "shape": [256, 32]}
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])
    result = invoke("inspect", folder)
    assert result.exit_code == 0
    assert "unknown" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "of a dtype that is not supported" in line


def test_a_gguf_file_and_back(source: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    report = converted(source, file, "--data", text, "--windows", 2)
    assert report["format"] == "dense"
    assert report["destination"] == str(file)
    assert report["loss_before"] == report["loss_after"]
    described = json.loads(invoke("inspect", file, "--json").stdout)
    assert described["parameters"] == CONFIG.parameter_count()
    assert invoke("generate", file, "--prompt", "a", "--max-new-tokens", 2).exit_code == 0
    converted(file, tmp_path / "back", "--to", "dense")
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_a_gguf_file_of_a_type_without_dead_neurons(
    source: Path, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    report = converted(
        source, tmp_path / "a.gguf", "--gguf-type", "q8_0", "--remove-dead", "--data", text
    )
    assert report["neurons_after"] < report["neurons_before"]
    assert report["ffn_bytes_after"] < 0.5 * report["ffn_bytes_before"]
    sparse = tmp_path / "sparse"
    converted(source, sparse, "--to", "csr")
    report = converted(sparse, tmp_path / "b.GGUF")
    assert report["format"] == "dense"


def test_what_a_gguf_file_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    there = tmp_path / "there.gguf"
    there.write_bytes(b"x")
    for arguments, code, message in (
        ((source, tmp_path / "a.gguf", "--to", "csr"), 2, "holds dense weights"),
        ((source, tmp_path / "a", "--gguf-type", "f16"), 2, "does not end in .gguf"),
        ((source, there), 1, "exists already and is left as it is; name a file"),
        ((there, tmp_path / "a", "--to", "dense"), 1, "not a GGUF file"),
        ((source, tmp_path / "a.gguf", "--gguf-type", "q4_0"), 2, "'q4_0' is not one of"),
        ((source, source / "a.gguf"), 1, "lies in"),
    ):
        result = invoke("convert", *arguments)
        assert result.exit_code == code, result.output
        assert message in result.stderr
        assert "Traceback" not in result.output
    assert there.read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.gguf"]


def test_a_silu_model_stays_dense(tmp_path: Path) -> None:
    config = replace(CONFIG, activation="silu")
    save_model(tmp_path / "a", Transformer(config, np.random.default_rng(0)), ByteTokenizer())
    result = invoke("convert", tmp_path / "a", tmp_path / "b", "--to", "csr")
    assert result.exit_code == 1
    assert "has the activation silu, with which only dense weights are supported" in result.stderr
    assert not (tmp_path / "b").exists()
