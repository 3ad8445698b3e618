"""What a training run shows: live on a terminal, plain lines otherwise.

A reporter shows on stderr what happens while the run goes on. The figures that it ends with are its
result, for stdout: :func:`print_summary`.
"""

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from twell_numba.infer.text_stream import printable
from twell_numba.train.config import TrainConfig

if TYPE_CHECKING:
    from rich.table import Table

_PLAIN_LINE_SECONDS = 5.0


class Reporter:
    """Receives what happens in a run and shows nothing; the base of those that show it."""

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the terminal as it was found."""

    def start(self, config: TrainConfig, facts: Mapping[str, str]) -> None:
        """Show the resolved settings and ``facts`` (corpus, parameters, run folder)."""

    def compiling(self) -> None:
        """Kernels are about to be compiled, or loaded if that was done before."""

    def compiled(self, seconds: float) -> None:
        """The kernels are ready."""

    def step(self, step: int, seconds_left: float | None) -> None:
        """A step is done; the estimate is None while there is nothing to go by."""

    def metrics(self, row: Mapping[str, Any], seconds_left: float | None) -> None:
        """A line was added to ``metrics.jsonl``."""

    def sample(self, step: int, text: str) -> None:
        """The model wrote a text."""

    def note(self, text: str) -> None:
        """Show one line."""


class LastingStream:
    """A text stream that never fails: once the one under it has, what is written is dropped.

    A run must not end because its terminal was closed, or the disk of its log is full.

    Parameters
    ----------
    stream : text stream or None
        None, as ``sys.stderr`` is where it was closed when Python started, takes nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The encoding of the stream underneath."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream underneath."""
        self._attempt(lambda stream: stream.flush())

    def isatty(self) -> bool:
        """Whether the stream underneath is a terminal."""
        return self._attempt(lambda stream: stream.isatty()) is True

    def _attempt(self, use: Callable[[TextIO], Any]) -> Any:
        stream = self._stream
        if stream is None:
            return None
        try:
            return use(stream)
        except (OSError, ValueError):  # ValueError: it was closed from within
            self._stream = None
            return None


class PlainReporter(Reporter):
    """Writes plain lines, not more than one every few seconds while steps go by."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = LastingStream(stream or sys.stderr)
        self._steps = 0
        self._last_line = float("-inf")

    def start(self, config: TrainConfig, facts: Mapping[str, str]) -> None:
        self._steps = config.steps
        for line in _plain_table(settings_table(config, facts)):
            self._print(line)

    def compiling(self) -> None:
        self._print("compiling kernels ...")

    def compiled(self, seconds: float) -> None:
        self._print(compiled_line(seconds))

    def metrics(self, row: Mapping[str, Any], seconds_left: float | None) -> None:
        now = time.monotonic()
        is_due = now - self._last_line >= _PLAIN_LINE_SECONDS
        if is_due or "validation_loss" in row:
            self._last_line = now
            self._print(progress_line(row, self._steps, seconds_left))

    def sample(self, step: int, text: str) -> None:
        self._print(f"--- sample after step {step}")
        self._print(text)
        self._print("---")

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveReporter(Reporter):
    """Shows a progress bar with the newest figures under it, on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        lasting = cast(TextIO, LastingStream(stream or sys.stderr))
        self._console = Console(file=lasting, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._figures = Text("")
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._text = Text
        self._task: Any = None
        self._steps = 0

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def start(self, config: TrainConfig, facts: Mapping[str, str]) -> None:
        self._steps = config.steps
        self._console.print(_rich_table("twell train", settings_table(config, facts)))

    def compiling(self) -> None:
        self._live.update(self._text("compiling kernels ...", style="dim"))
        self._live.start(refresh=True)

    def compiled(self, seconds: float) -> None:
        from rich.console import Group

        self.note(compiled_line(seconds))
        self._task = self._progress.add_task("step", total=self._steps, left="")
        self._live.update(Group(self._progress, self._figures))

    def step(self, step: int, seconds_left: float | None) -> None:
        self._progress.update(self._task, completed=step, left=time_left_text(seconds_left))

    def metrics(self, row: Mapping[str, Any], seconds_left: float | None) -> None:
        line = progress_line(row, self._steps, seconds_left)
        self._figures.plain = figures_text(row)
        if "validation_loss" in row:
            self.note(line)

    def sample(self, step: int, text: str) -> None:
        from rich.panel import Panel

        # A Text, so that brackets in the sample are not taken for markup; printable, so that what a
        # young model writes does not command the terminal.
        written = self._text(printable(text))
        self._console.print(Panel(written, title=f"sample after step {step}", title_align="left"))

    def note(self, text: str) -> None:
        self._console.print(self._text(text))


def reporter_for(stream: TextIO | None = None) -> Reporter:
    """Return a live reporter if the stream (stderr) is a terminal, a plain one otherwise."""
    stream = stream or sys.stderr
    is_terminal = LastingStream(stream).isatty()
    return LiveReporter(stream) if is_terminal else PlainReporter(stream)


def print_summary(summary: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print a finished run's figures to a stream, stdout if none is given."""
    stream = stream or sys.stdout
    if stream is None:  # it was closed when Python started
        return
    rows = summary_table(summary)
    if stream.isatty():
        from rich.console import Console

        Console(file=stream, highlight=False).print(_rich_table("summary", rows))
    else:
        for line in _plain_table(rows):
            print(line, file=stream)


def settings_table(config: TrainConfig, facts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings, a row for each group of them, then the facts."""
    sections: dict[str, list[str]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if field.name == "sample_prompt":
            text = repr(value)
        sections.setdefault(field.metadata["section"], []).append(f"{field.name}={text}")
    return [(section, " ".join(values)) for section, values in sections.items()] + list(
        facts.items()
    )


def compiled_line(seconds: float) -> str:
    """Say how long compiling took, and that it counts for nothing else."""
    return f"compiling kernels: {seconds:.1f} s (not counted in tokens/s and time left)"


def figures_text(row: Mapping[str, Any]) -> str:
    """Return the figures of a line of ``metrics.jsonl``."""
    nonzeros = row["nonzeros_per_token"]
    parts = [f"loss {row['loss']:.4f}"]
    if "validation_loss" in row:
        parts.append(f"validation {row['validation_loss']:.4f}")
    parts += [
        f"activation sparsity {row['activation_sparsity']:.2%}",
        f"nonzeros/token {sum(nonzeros) / len(nonzeros):.1f}",
        f"dead {row['dead_neuron_fraction']:.1%}",
    ]
    weight_density = _mean_weight_density(row)
    if weight_density < 1:
        parts.append(f"FFN weights {weight_density:.2%}")
    parts += [
        f"lr {row['learning_rate']:.2e}",
    ]
    if row["tokens_per_second"] is not None:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def _mean_weight_density(row: Mapping[str, Any]) -> float:
    by_matrix = row["ffn_weight_density"].values()
    return sum(map(sum, by_matrix)) / sum(map(len, by_matrix))


def progress_line(row: Mapping[str, Any], steps: int, seconds_left: float | None) -> str:
    """Return one line for a line of ``metrics.jsonl``."""
    step = f"step {row['step']:>{len(str(steps))}}/{steps}"
    return "  ".join(filter(None, (step, figures_text(row), time_left_text(seconds_left))))


def time_left_text(seconds: float | None) -> str:
    """Return ``2m05s left``, or nothing while it is not known."""
    return "" if seconds is None else f"{duration_text(seconds)} left"


def duration_text(seconds: float) -> str:
    """Return seconds as ``7s``, ``2m05s`` or ``3h04m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def before_table(before: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return a row for each measurement of the model that a run goes on from (``before.json``)."""
    titles = {"source": "the model as it was", "switched": "with the new activation"}
    return [
        (
            titles[name],
            f"validation loss {measured['loss']:.4f}, "
            f"activation sparsity {measured['ffn_activation_sparsity']:.2%}",
        )
        for name, measured in before.items()
    ]


def summary_table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table that ends a run."""
    speed = summary["tokens_per_second"]
    return [
        *before_table(summary.get("before") or {}),
        ("validation loss", f"{summary['loss']:.4f} nats a token"),
        ("perplexity", f"{summary['perplexity']:.3f}"),
        ("bits per byte", f"{summary['bits_per_byte']:.4f}"),
        ("FFN activation sparsity", f"{summary['ffn_activation_sparsity']:.2%}"),
        (
            "nonzeros a token, by layer",
            " ".join(f"{count:.1f}" for count in summary["nonzeros_per_token"]),
        ),
        ("dead neurons", f"{summary['dead_neuron_fraction']:.1%}"),
        ("FFN weight sparsity", f"{summary['ffn_weight_sparsity']:.2%}"),
        ("steps", f"{summary['steps']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("tokens a second", "-" if speed is None else f"{speed:,.0f}"),
        ("time", duration_text(summary["seconds"])),
        ("device", summary["device"]),
        ("seed", str(summary["seed"])),
    ]


def _plain_table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(title) for title, _ in rows)
    return [f"{title:<{width}}  {text}" for title, text in rows]


def _rich_table(title: str, rows: list[tuple[str, str]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def closing_lines(config: TrainConfig, run: str | os.PathLike[str]) -> list[str]:
    """Say where the run is and what to try next."""
    prompt = config.sample_prompt.replace("\\", "\\\\").replace('"', '\\"')
    shown = f'"{prompt}"' if prompt.isprintable() and "$" not in prompt else '"def "'
    return [
        f"the run is in {run}",
        "next:",
        f"  twell generate {shlex.quote(str(run))} --prompt {shown}",
        f"  twell eval {shlex.quote(str(run))}",
    ]
