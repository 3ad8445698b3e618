"""``twell eval --tasks``: multiple-choice files from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

EXAMPLES = Path(__file__).parents[2] / "examples" / "questions.jsonl"
TASK_KEYS = {
    "task",
    "file",
    "questions",
    "acc",
    "acc_stderr",
    "acc_norm",
    "acc_norm_stderr",
    "chance",
    "truncated",
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(twell, list(map(str, arguments)), prog_name="twell")


def error_line(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "model"
    config = ModelConfig(
        vocab_size=256,
        d_model=16,
        d_ffn=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=2,
        context_length=32,
    )
    save_model(folder, Transformer(config, np.random.default_rng(0)), ByteTokenizer())
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of some text\n" for number in range(500)))
    return path


def test_tasks_alone_are_all_that_is_measured(checkpoint: Path) -> None:
    result = invoke("eval", checkpoint, "--tasks", EXAMPLES, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed.keys() == {"tasks"}
    (task,) = printed["tasks"]
    assert task.keys() == TASK_KEYS
    assert (task["task"], task["file"]) == ("questions", str(EXAMPLES))
    assert task["questions"] == 42
    assert 0 <= task["acc"] <= 1
    # 32 bytes are less than some of these have.
    assert f"{task['truncated']} of them are longer than the model's context of 32" in result.stderr


def test_tasks_beside_text(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(EXAMPLES.read_text().splitlines()[0])
    options = ("--tasks", EXAMPLES, "--tasks", other, "--data", text, "--limit", 3)
    result = invoke("eval", checkpoint, *options, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["loss"] > 0
    assert [task["task"] for task in printed["tasks"]] == ["questions", "other"]
    assert [task["questions"] for task in printed["tasks"]] == [3, 1]
    assert printed["tasks"][1]["acc_stderr"] is None
    shown = invoke("eval", checkpoint, *options).stdout
    assert "perplexity" in shown
    assert shown.splitlines()[-3].split() == [
        *("task", "questions", "acc", "+-", "acc", "by", "byte", "+-", "chance")
    ]
    assert shown.splitlines()[-1].split()[-1] == "25.00%"


def test_the_separator_is_the_users(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps({"context": "x" * 31, "choices": ["y", "zz"], "answer": 0}))
    for options, truncated in (((), 1), (("--separator", ""), 0)):
        result = invoke("eval", checkpoint, "--tasks", file, "--json", *options)
        # the longer choice leaves room for 30 bytes if a blank stands before it, or for 31
        assert json.loads(result.stdout)["tasks"][0]["truncated"] == truncated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--limit", 3), "--limit 3 given without --tasks"),
        (("--separator", ""), "--separator '' given without --tasks"),
        (("--tasks", EXAMPLES, "--windows", 3), "--windows 3 given without --data"),
        (("--tasks", EXAMPLES, "--context", 3), "--context 3 given without --data"),
    ],
)
def test_options_that_would_do_nothing(
    checkpoint: Path, options: tuple[object, ...], message: str
) -> None:
    assert message in error_line(invoke("eval", checkpoint, *options), 2)


def test_a_damaged_line_is_named_before_the_model_is_read(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"context": "x", "choices": ["y"], "answer": 0}\n')
    line = error_line(invoke("eval", tmp_path / "no model", "--tasks", file), 1)
    assert f"{file} line 1: choices ['y'] given, a list of 2 to 26 texts wanted" in line


def test_a_choice_that_cannot_fit(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps({"context": "x", "choices": ["y" * 40, "z"], "answer": "A"}))
    result = invoke("eval", checkpoint, "--tasks", file)
    assert result.exit_code == 1
    assert f"{file} line 1: a choice of 41 tokens given, at most 32 wanted" in result.stderr


def test_the_length_of_sequences(checkpoint: Path, text: Path) -> None:
    result = invoke("eval", checkpoint, "--data", text, "--context", 8)
    assert "sequences of 8 tokens" in result.stderr
    line = invoke("eval", checkpoint, "--data", text, "--context", 33).stderr.splitlines()[-1]
    assert line == ("Error: sequences of 33 tokens given, at most the model's context of 32 wanted")
