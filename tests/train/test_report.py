"""What a run shows on the way."""

import errno
import io
import math
import sys
from pathlib import Path

import pytest

from twell_numba.train.config import TrainConfig
from twell_numba.train.report import (
    LiveReporter,
    PlainReporter,
    closing_lines,
    duration_text,
    figures_text,
    print_summary,
    reporter_for,
)

ROW = {
    "step": 5,
    "tokens": 320,
    "loss": 2.5,
    "l1_loss": 0.1,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "l1_strength": 1e-3,
    "tokens_per_second": 12345.6,
    "activation_sparsity": 0.9712,
    "nonzeros_per_token": [10.0, 20.0],
    "dead_neuron_fraction": 0.25,
    "ffn_paths": ["dense", "twell"],
    "ffn_weight_density": {"gate_proj": [1.0, 1.0], "up_proj": [1.0, 1.0]},
    "validation_loss": 2.6,
}
SUMMARY = {
    "loss": 2.6,
    "perplexity": 13.46,
    "bits_per_byte": 3.75,
    "ffn_activation_sparsity": 0.97,
    "nonzeros_per_token": [10.0, 20.0],
    "dead_neuron_fraction": 0.25,
    "ffn_weight_sparsity": 0.0,
    "steps": 10,
    "tokens": 640,
    "tokens_per_second": None,
    "seconds": 125.0,
    "device": "cpu",
    "seed": 0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show_a_run(reporter):
    config = TrainConfig(steps=10)
    with reporter:
        reporter.start(config, {"Corpus": "a [bold]text[/bold]", "Parameters": "1,082,496"})
        reporter.compiling()
        reporter.compiled(3.21)
        reporter.step(5, 62.0)
        reporter.metrics(ROW, 62.0)
        reporter.sample(5, "x[0] = [/nonsense] \ufffd")
        reporter.note("a note")


@pytest.mark.parametrize("kind", [PlainReporter, LiveReporter])
def test_everything_is_shown(kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal() if kind is LiveReporter else io.StringIO()
    show_a_run(kind(stream))
    shown = stream.getvalue()
    for part in (
        "learning_rate=0.001",
        "a [bold]text[/bold]",
        "1,082,496",
        "compiling kernels: 3.2 s",
        "step  5/10",
        "loss 2.5000",
        "validation 2.6000",
        "activation sparsity 97.12%",
        "nonzeros/token 15.0",
        "dead 25.0%",
        "lr 1.00e-03",
        "12,346 tokens/s",
        "1m02s left",
        "x[0] = [/nonsense]",
        "a note",
    ):
        assert part in shown, part


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_summary_is_a_table_on_a_terminal_and_plain_lines_elsewhere(kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = kind()
    print_summary(SUMMARY, stream)
    lines = stream.getvalue().splitlines()
    if kind is Terminal:
        assert lines[0].strip() != "validation loss"
        assert any(
            "bits per byte" in line and "\N{BOX DRAWINGS LIGHT VERTICAL}" in line for line in lines
        )
    else:
        assert lines[0] == "validation loss             2.6000 nats a token"
        assert len(lines) == 13
    for part in ("3.7500", "10.0 20.0", "97.00%", "2m05s"):
        assert part in stream.getvalue(), part


def test_the_summary_goes_to_stdout_and_an_infinite_perplexity_is_shown(capsys):
    print_summary({**SUMMARY, "perplexity": math.inf})
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "perplexity                  inf\n" in shown.out


def test_the_density_of_weights_is_shown_once_it_is_below_1():
    assert "FFN weights" not in figures_text(ROW)
    density = {"gate_proj": [0.5, 0.1], "up_proj": [0.2, 0.2]}
    assert "FFN weights 25.00%" in figures_text({**ROW, "ffn_weight_density": density})


def test_plain_lines_are_few_but_validations_are_never_left_out():
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    for step in range(1, 100):
        row = {**ROW, "step": step}
        if step != 50:
            del row["validation_loss"]
        reporter.metrics(row, None)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "validation" in lines[1]


def test_the_reporter_follows_the_terminal():
    assert isinstance(reporter_for(io.StringIO()), PlainReporter)
    assert isinstance(reporter_for(Terminal()), LiveReporter)


class Full(Terminal):
    """A terminal or file that takes a few lines, and then no more."""

    def __init__(self, error, lines=2):
        super().__init__()
        self.left = lines
        self.error = error
        self.failures = 0

    def write(self, text):
        if self.left == 0:
            self.failures += 1
            raise self.error
        self.left -= 1
        return super().write(text)


@pytest.mark.parametrize("kind", [PlainReporter, LiveReporter])
@pytest.mark.parametrize("lines", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ValueError("I/O operation on closed file"),
    ],
    ids=["full", "terminal gone", "pipe closed", "closed"],
)
def test_a_stream_that_fails_ends_the_report_and_not_the_run(kind, error, lines, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Full(error, lines)
    show_a_run(kind(stream))
    assert stream.failures == 1, "it is not tried again"


def test_without_a_stderr_nothing_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    show_a_run(reporter_for())
    show_a_run(PlainReporter())
    closed = io.StringIO()
    closed.close()
    show_a_run(reporter_for(closed))
    assert capsys.readouterr().out == ""


def test_without_a_stdout_the_summary_is_not_shown(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    print_summary(SUMMARY)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.6, "1h00m"), (11_040, "3h04m")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_the_next_command_can_be_pasted_into_a_shell():
    lines = "\n".join(closing_lines(TrainConfig(), Path("my runs/tiny-1")))
    assert "twell generate 'my runs/tiny-1' --prompt \"def \"" in lines
    assert '--prompt "def "' in "\n".join(
        closing_lines(TrainConfig(sample_prompt="a\nb"), Path("run"))
    )


def test_a_sample_cannot_command_the_terminal():
    stream = Terminal()
    with LiveReporter(stream) as reporter:
        reporter.sample(1, "before\x1bcafter\x1a")
    assert r"before\x1bcafter\x1a" in stream.getvalue()
