"""The commands around one small run: train, eval, generate, inspect, resume."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.formats import HybridELLMatrix
from twell_numba.models.checkpoint import load_model, save_model

SETTINGS = {
    "steps": 4,
    "batch_size": 2,
    "context_length": 16,
    "d_model": 16,
    "d_ffn": 32,
    "n_layers": 2,
    "n_heads": 2,
    "eval_interval": 2,
    "eval_batches": 2,
    "sample_interval": 0,
    "checkpoint_interval": 2,
}
LOSSES = {"loss", "perplexity", "bits_per_byte"}
REPORTED = LOSSES | {
    "ffn_activation_sparsity",
    "nonzeros_per_token",
    "dead_neuron_fraction",
    "ffn_weight_sparsity",
}


def invoke(*arguments: object, input: bytes | None = None) -> Result:
    return CliRunner().invoke(twell, list(map(str, arguments)), prog_name="twell", input=input)


def error_line(result: Result, code: int) -> str:
    """Return the one line of a refused command, which has this exit code and no result."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def settings_options() -> list[str]:
    return [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some text.txt"
    path.write_text("".join(f"line {number} of some text\n" for number in range(500)))
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    run = tmp_path_factory.mktemp("runs") / "run"
    result = invoke("train", *settings_options(), "--data", text, "--out", run, "--json")
    assert result.exit_code == 0, result.output
    return run, result


@pytest.fixture(scope="module")
def run(trained: tuple[Path, Result]) -> Path:
    return trained[0]


def test_training_prints_its_summary_and_nothing_else_to_stdout(
    trained: tuple[Path, Result],
) -> None:
    run, result = trained
    printed = json.loads(result.stdout)
    assert printed == {"run": str(run), **json.loads((run / "summary.json").read_text())}
    assert printed.keys() > REPORTED
    assert printed["steps"] == 4
    assert "compiling" in result.stderr
    assert f"the run is in {run}" in result.stderr


def test_the_summary_goes_to_stdout_and_all_else_to_stderr(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = invoke("train", *settings_options(), "--data", text, "--out", run)
    assert result.exit_code == 0, result.output
    titles = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert titles[:3] == ["validation loss", "perplexity", "bits per byte"]
    assert titles[-1] == "seed"
    assert "n_heads=2 n_kv_heads=2" in result.stderr
    assert "n_kv_heads = 2 " in (run / "config.toml").read_text()
    assert result.stderr.splitlines()[-1] == f"  twell eval {run}"


def test_a_perplexity_that_overflows_is_null_in_json(run: Path, text: Path, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    model, tokenizer = load_model(run)
    table = model.parameters()["model.embed_tokens.weight"].value
    table *= 1e6
    save_model(tmp_path / "model", model, tokenizer)
    result = invoke("eval", tmp_path / "model", "--data", text, "--windows", 2, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout, parse_constant=refuse)
    assert {key for key, value in printed.items() if value is None} == {"perplexity"}


def test_a_model_that_has_diverged_is_not_measured(run: Path, text: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(run)
    table = model.parameters()["model.embed_tokens.weight"].value
    table[5] = np.nan
    save_model(tmp_path / "model", model, tokenizer)
    line = error_line(invoke("eval", tmp_path / "model", "--data", text), 1)
    assert "model.embed_tokens.weight" in line
    assert "not finite" in line
    # Finite, but what it gives is not.
    table[:] = 1e5
    model.parameters()["model.norm.weight"].value[:] = 1e38
    save_model(tmp_path / "model", model, tokenizer)
    result = invoke("eval", tmp_path / "model", "--data", text, "--windows", 2)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "a finite number wanted" in result.stderr


def test_options_win_over_set_and_set_over_the_file(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("seed = 1\nbatch_size = 3\nlog_interval = 1\n")
    arguments = ["train", *settings_options(), "--config", config, "--set", "seed=2"]
    run = tmp_path / "run"
    result = invoke(*arguments, "--seed", 3, "--steps", 1, "--data", text, "--out", run, "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("validation loss ")
    written = (run / "config.toml").read_text()
    assert "seed = 3 " in written
    assert "steps = 1 " in written
    assert "batch_size = 2 " in written
    assert "log_interval = 1 " in written


def test_a_run_that_exists_is_refused_and_left_as_it_was(run: Path, text: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    line = error_line(invoke("train", "--data", text, "--out", run), 1)
    assert str(run) in line
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_run_is_resumed_with_more_steps(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    result = invoke("train", "--resume", copy, "--steps", 5, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 5
    assert json.loads(invoke("inspect", copy, "--json").stdout)["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--preset", "tinny"], 2, "did you mean 'tiny'?"),
        (["--set", "d_modle=8"], 2, "did you mean 'd_model'?"),
        (["--set", "d_model=wide"], 2, "a whole number wanted"),
        (["--set", "d_model=130"], 2, "not divisible by n_heads"),
        (["--set", "d_model"], 2, "key=value wanted"),
        (["--steps", "0"], 2, "at least 1 wanted"),
        (["--target-density", "0"], 2, "target_density=0.0 given, a number above 0 and at most 1"),
        (["--target-density", "1.5"], 2, "target_density=1.5 given, a number above 0"),
        (["--target-density", "nan"], 2, "a finite number wanted"),
        (["--target-density", "few"], 2, "target_density='few' given, a number wanted"),
        (["--set", "sparse_format=block_ell", "--set", "block_size=999"], 2, "1 to 128 wanted"),
        (["--config", "missing.toml"], 1, "missing.toml"),
        (["--data", "missing.txt"], 1, "missing.txt"),
        (["--resume", "missing"], 1, "missing"),
        (["--out", ""], 2, "--out '' given"),
        (["--out", " "], 2, "--out ' ' given"),
        (["--set", "steps=1\nd_ffn=3"], 2, "it holds more settings"),
        (["--data", "~nosuchuser/x"], 1, "nobody's home folder is ~nosuchuser"),
        (["--resume", "missing", "--preset", "tiny"], 2, "--preset tiny given with --resume"),
        (["--resume", "missing", "--out", "other"], 2, "--out other given with --resume"),
    ],
)
def test_bad_training_requests_are_one_line_and_leave_nothing(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(invoke("train", *arguments), code)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_trained_to_a_target_density(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*settings_options(), "--set", "sparse_from=3", "--target-density", "0.2"]
    result = invoke("train", *options, "--data", text, "--out", run, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ffn_weight_sparsity"] == pytest.approx(0.8, abs=1e-3)
    assert "FFN weights 19.99%" in result.stderr
    line = error_line(invoke("train", "--resume", run, "--steps", 5, "--target-density", 0.1), 2)
    assert "target_density=0.1 given to resume a run with target_density=0.2" in line
    result = invoke("train", "--resume", run, "--steps", 5, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ffn_weight_sparsity"] == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("content", ["", "short"])
def test_too_little_data_is_one_line_and_leaves_nothing(content: str, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text(content)
    error_line(invoke("train", "--data", data, "--out", tmp_path / "run"), 1)
    assert list(tmp_path.iterdir()) == [data]


def test_evaluation_measures_the_last_validation_again(trained: tuple[Path, Result]) -> None:
    run, result = trained
    measured = json.loads(invoke("eval", run, "--json").stdout)
    assert measured.keys() == REPORTED
    summary = json.loads(result.stdout)
    assert measured["loss"] == pytest.approx(summary["loss"], rel=1e-5)
    assert measured["nonzeros_per_token"] == pytest.approx(summary["nonzeros_per_token"], rel=1e-2)


def test_evaluation_as_a_table_has_a_row_a_layer(run: Path, text: Path) -> None:
    result = invoke("eval", run / "checkpoints" / "step-4", "--data", text, "--windows", 2)
    assert result.exit_code == 0
    assert "Measuring 2 sequences of 16 tokens" in result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["layer", "0", "1"]
    assert lines[0].startswith("loss ")


def test_evaluation_of_a_foreign_checkpoint_asks_for_data(
    run: Path, text: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(run / "checkpoints" / "step-4", checkpoint)
    assert "--data" in error_line(invoke("eval", checkpoint), 1)
    assert invoke("eval", checkpoint, "--data", text).exit_code == 0


def test_evaluation_refuses_data_of_another_tokenizer(
    run: Path, text: Path, tmp_path: Path
) -> None:
    prepared = tmp_path / "text.bin"
    made = invoke("data", "prepare", text, prepared, "--tokenizer", "bpe", "--bpe-vocab-size", 300)
    assert made.exit_code == 0, made.output
    line = error_line(invoke("eval", run, "--data", prepared), 1)
    assert "another tokenizer" in line


def test_text_goes_on_from_the_prompt_and_the_seed_decides(run: Path) -> None:
    def written(*options: object) -> str:
        result = invoke("generate", run, "--prompt", "line ", "--max-new-tokens", 8, *options)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert written("--seed", 1).startswith("line ")
    assert written("--seed", 1) == written("--seed", 1)
    assert written("--seed", 1) != written("--seed", 2)
    greedy = written("--temperature", 0)
    assert all(
        written("--temperature", 0, "--ffn-path", path) == greedy for path in ("dense", "twell")
    )


def test_a_setting_out_of_range_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    options = ("--prompt", "x", "--top-k", 10**30)
    line = error_line(invoke("generate", tmp_path / "no model", *options), 2)
    assert "top-k 1000000000000000000000000000000 given, 0 to 2147483647 wanted" in line


def test_weights_can_be_held_as_8_bit_floats(run: Path) -> None:
    losses = []
    for options in ([], ["--float8"], ["--float8", "--ffn-path", "twell"]):
        result = invoke("eval", run, *options, "--json")
        assert result.exit_code == 0, result.output
        losses.append(json.loads(result.stdout)["loss"])
    assert losses[1] != losses[0]
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-2)
    assert "dense, 8-bit floats" in invoke("eval", run, "--float8").stdout
    text = invoke("generate", run, "--prompt", "line ", "--max-new-tokens", 4, "--float8").stdout
    assert text.startswith("line ")
    line = error_line(invoke("eval", run, "--float8", "--ffn-path", "dense"), 2)
    assert "FFN path dense given for weights held as 8-bit floats, one of auto, twell" in line


def test_a_prompt_is_read_from_stdin(run: Path) -> None:
    options = ["--max-new-tokens", 3, "--temperature", 0]
    piped = invoke("generate", run, "--prompt", "-", *options, input=b"line\n")
    assert piped.stdout == invoke("generate", run, "--prompt", "line", *options).stdout
    assert "not UTF-8" in error_line(invoke("generate", run, "--prompt", "-", input=b"\xff"), 2)


def test_a_prompt_is_reported_as_the_model_saw_it(run: Path) -> None:
    result = invoke("generate", run, "--prompt", "a\udcffb", "--max-new-tokens", 1, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["prompt"] == "a\ufffdb"
    assert report["prompt_tokens"] == 5


def test_a_stop_text_ends_the_text_before_it(run: Path) -> None:
    options = ["--prompt", "line ", "--max-new-tokens", 9, "--temperature", 0, "--json"]
    whole = json.loads(invoke("generate", run, *options).stdout)["text"]
    stop = whole[3:5]
    report = json.loads(
        invoke("generate", run, *options, "--stop", "never this", "--stop", stop).stdout
    )
    assert report["text"] == whole[: whole.index(stop)]
    assert report["reason"] == "stop"


def test_cuts_and_penalties_change_the_text(run: Path) -> None:
    def written(*options: object) -> str:
        result = invoke("generate", run, "--prompt", "line ", "--max-new-tokens", 10, *options)
        assert result.exit_code == 0, result.output
        return result.stdout

    hot = ["--temperature", 3]
    assert written(*hot, "--min-p", 1) == written("--temperature", 0)
    assert written(*hot, "--min-p", 1) != written(*hot)
    assert written("--temperature", 0, "--repetition-penalty", 5) != written("--temperature", 0)


def test_log_probabilities_are_reported(run: Path) -> None:
    options = ["--prompt", "line ", "--max-new-tokens", 3, "--temperature", 0, "--logprobs", 2]
    report = json.loads(invoke("generate", run, *options, "--json").stdout)
    assert "".join(entry["text"] for entry in report["logprobs"]) == report["text"]
    for entry in report["logprobs"]:
        top = entry.pop("top")
        assert top[0] == entry
        assert 0 >= top[0]["logprob"] >= top[1]["logprob"]
    assert "add --json" in error_line(invoke("generate", run, *options), 2)


ESCAPES = "\x1b[31ma\x07"


def test_a_file_gets_control_characters_as_they_are(run: Path) -> None:
    result = invoke("generate", run, "--prompt", ESCAPES, "--max-new-tokens", 0)
    assert result.stdout == ESCAPES + "\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_is_shown_control_characters(run: Path) -> None:
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "twell_numba", "generate", str(run), "--max-new-tokens", "0"]
    subprocess.run([*command, "--prompt", ESCAPES], stdout=end, check=True, timeout=60)
    os.close(end)
    written = os.read(terminal, 1000)
    os.close(terminal)
    assert written == b"\\x1b[31ma\\x07\r\n"


def test_the_end_of_the_context_is_noted_on_stderr(run: Path) -> None:
    result = invoke("generate", run, "--prompt", "line", "--max-new-tokens", 100)
    assert result.exit_code == 0
    assert "context of 16 tokens is full" in result.stderr
    report = json.loads(
        invoke("generate", run, "--prompt", "line", "--max-new-tokens", 100, "--json").stdout
    )
    assert report["reason"] == "context"
    assert report["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["--prompt", "x", "--temperature", "nan"], 2, "temperature"),
        (["--prompt", "x", "--top-p", "2"], 2, "top"),
        (["--prompt", "x", "--top-k", "-1"], 2, "top"),
        (["--prompt", "x", "--min-p", "2"], 2, "min-p"),
        (["--prompt", "x", "--repetition-penalty", "0"], 2, "repetition-penalty"),
        (["--prompt", "x", "--stop", ""], 2, "empty stop text"),
        (["--prompt", "x", "--max-new-tokens", "-1"], 2, "max-new-tokens"),
        (["--prompt", ""], 2, "empty prompt"),
        (["--prompt", "a prompt of more than sixteen tokens"], 2, "context"),
    ],
)
def test_bad_generation_requests_are_one_line(
    run: Path, options: list[str], code: int, message: str
) -> None:
    assert message in error_line(invoke("generate", run, *options), code)


def test_inspection_shows_the_model_and_where_training_stands(run: Path) -> None:
    description = json.loads(invoke("inspect", run, "--json").stdout)
    model, _ = load_model(run)
    assert description["parameters"] == model.config.parameter_count()
    assert description["step"] == 4
    assert description["resumable"] is True
    table = invoke("inspect", run / "checkpoints" / "step-4" / "model.safetensors").stdout
    assert "step 4" in table
    assert "model.layers.1.mlp.gate_proj.weight" in table


def test_inspection_shows_a_saved_matrix(tmp_path: Path) -> None:
    path = tmp_path / "matrix.safetensors"
    HybridELLMatrix.from_dense([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]], width=2).save(path)
    result = invoke("inspect", path)
    assert result.exit_code == 0
    assert "HybridELLMatrix" in result.stdout
    assert "rows by number of nonzeros" in result.stdout


@pytest.mark.parametrize("command", [["inspect"], ["eval"], ["generate", "--prompt", "x"]])
def test_foreign_and_missing_files_are_one_line(command: list[str], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"not a checkpoint at all")
    name, *options = command
    for path in (foreign, tmp_path / "missing", tmp_path):
        assert str(path) in error_line(invoke(name, path, *options), 1)


def test_a_truncated_checkpoint_is_one_line(run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(run / "checkpoints" / "step-4", checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    for command in (["inspect", checkpoint], ["generate", checkpoint, "--prompt", "x"]):
        assert "model.safetensors" in error_line(invoke(*command), 1)


def test_a_reader_that_has_enough_ends_generation_quietly(run: Path) -> None:
    command = [sys.executable, "-c", "from twell_numba.cli import main; main()"]
    arguments = ["generate", str(run), "--prompt", "line"]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        assert stream.read() == b""
    assert process.wait(timeout=60) != 0
