"""``twell chat``, by a script and in a terminal."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from twell_numba.cli import twell
from twell_numba.models.checkpoint import save_model
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

PLAIN = "This model has no chat template"
SHORT = ("--max-new-tokens", 5, "--temperature", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold ``short`` and ``long``: the same model with a context of 100 and 30000."""
    folder = tmp_path_factory.mktemp("models")
    for name, context in (("short", 100), ("long", 30_000)):
        config = ModelConfig(
            vocab_size=256, d_model=32, d_ffn=64, n_layers=2, n_heads=4, n_kv_heads=2,
            context_length=context, tied_embeddings=False,
        )  # fmt: skip
        model = Transformer(config, np.random.default_rng(3))
        for parameter in model.parameters().values():
            if parameter.value.ndim == 2:
                parameter.value *= 12
        # Of the controls it writes the bell only, which a terminal would ring.
        head = model.parameters()["lm_head.weight"].value
        head[:7] = head[8 : ord(" ")] = head[ord("~") + 1 :] = 0
        save_model(folder / name, model, ByteTokenizer())
    return folder


def chat(folder: Path, lines: str | bytes, *options: object) -> Result:
    arguments = ["chat", str(folder), *map(str, options)]
    return CliRunner().invoke(twell, arguments, prog_name="twell", input=lines)


def test_a_script_gets_an_answer_for_every_line(folders: Path) -> None:
    result = chat(folders / "short", "Hello\n\n  \nAgain\n", *SHORT)
    assert result.exit_code == 0, result.output
    first, second, rest = result.stdout.split("\n")
    assert (len(first), len(second), rest) == (5, 5, "")
    (note,) = result.stderr.splitlines()
    assert note.startswith(PLAIN)
    assert chat(folders / "short", "Hello\nAgain", *SHORT).stdout == result.stdout


def test_reset_begins_anew_and_exit_ends(folders: Path) -> None:
    lines = chat(folders / "short", "Hi\n/reset\nHi\nHi\n/exit\nHi\n", *SHORT).stdout.splitlines()
    assert len(lines) == 3
    assert lines[0] == lines[1]
    assert lines[1] != lines[2]


def test_a_system_message_and_a_seed_change_the_answers(folders: Path) -> None:
    def answer(*options: object) -> str:
        return chat(folders / "short", "Hi\n", "--max-new-tokens", 8, *options).stdout

    assert answer("--seed", 1) == answer("--seed", 1)
    assert answer("--seed", 1) != answer("--seed", 2)
    assert answer("--temperature", 0) != answer("--temperature", 0, "--system", "Be brief.")


def test_a_conversation_longer_than_the_context_goes_on_with_a_notice(folders: Path) -> None:
    result = chat(folders / "short", "Hello again\n" * 12, *SHORT)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 12
    notices = result.stderr.splitlines()[1:]
    assert notices
    assert all("the oldest" in line and "are forgotten" in line for line in notices)


def test_bytes_that_are_no_text_are_replaced(folders: Path) -> None:
    assert chat(folders / "short", b"\xff\xfe\n", *SHORT).exit_code == 0


@pytest.mark.parametrize(
    ("lines", "options", "code", "message"),
    [
        ("x" * 200, (), 2, "shorten it"),
        ("", ("--temperature", -1), 2, "temperature -1.0 given"),
        ("", ("--min-p", 2), 2, "min-p 2.0 given"),
        ("", ("--max-new-tokens", -1), 2, "max-new-tokens -1 given"),
    ],
)
def test_a_mistake_is_one_line(
    folders: Path, lines: str, options: tuple[object, ...], code: int, message: str
) -> None:
    result = chat(folders / "short", lines, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = chat(tmp_path / "none", "Hi")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")


class Terminal:
    """A program in a terminal of its own; its stdout can be a pipe."""

    def __init__(self, *command: object, stdout: int | None = None) -> None:
        import pty

        self._own, other = pty.openpty()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=other,
            stdout=other if stdout is None else stdout,
            stderr=other,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(other)
        self.seen = ""

    def read_until(self, wanted: str, seconds: float = 60) -> str:
        """Return what is written up to a text and with it, since the last call."""
        end = time.monotonic() + seconds
        while wanted not in self.seen:
            ready, _, _ = select.select([self._own], [], [], max(0, end - time.monotonic()))
            assert ready, f"{wanted!r} did not come, but {self.seen!r}"
            self.seen += os.read(self._own, 4096).decode(errors="replace")
        start, found, self.seen = self.seen.partition(wanted)
        return start + found

    def interrupt_until(self, wanted: str) -> None:
        """Send what Ctrl-C does until a text comes: a prompt may miss it while it is printed."""
        for _ in range(30):
            self.process.send_signal(signal.SIGINT)
            try:
                self.read_until(wanted, 2)
                return
            except AssertionError:
                pass
        raise AssertionError(f"{wanted!r} did not come, but {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are POSIX's here")
def test_in_a_terminal_answers_stream_and_ctrl_c_stops_them(folders: Path) -> None:
    command = (sys.executable, "-m", "twell_numba", "chat", folders / "long")
    terminal = Terminal(*command, "--max-new-tokens", 20_000, "--temperature", 0)
    try:
        terminal.read_until("Ctrl-C stops an answer.")
        terminal.read_until("> ")
        terminal.interrupt_until("(/exit or Ctrl-D ends)")  # nothing is to be stopped yet
        terminal.read_until("> ")
        terminal.type("Hello\n")
        text = terminal.read_until("\\x07")  # a control, written out
        assert "\x07" not in text
        terminal.interrupt_until("\r\n> ")
        terminal.type("/reset\n")
        terminal.read_until("> ")
        terminal.type("/quit\n")
        terminal.read_until("/quit given, /reset or /exit wanted")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are POSIX's here")
def test_answers_to_a_terminal_can_go_to_a_file_alone(folders: Path) -> None:
    command = (sys.executable, "-m", "twell_numba", "chat", folders / "short", *SHORT)
    terminal = Terminal(*command, stdout=subprocess.PIPE)
    try:
        for line in ("Hello\n", "Again\n", "\x04"):
            terminal.read_until("> ")
            terminal.type(line)
        assert terminal.process.stdout is not None
        with terminal.process.stdout as stdout:
            answers = stdout.read().decode()
        assert answers == chat(folders / "short", "Hello\nAgain\n", *SHORT).stdout
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
