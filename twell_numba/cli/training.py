"""What the commands that train have in common."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import click

from twell_numba.cli.text import note
from twell_numba.errors import UsageError
from twell_numba.strict_json import to_json

if TYPE_CHECKING:
    from twell_numba.train.config import TrainConfig


def as_overrides(named: Mapping[str, str | int | None]) -> list[str]:
    """Return ``key=value`` for each setting that was given by an option of its own."""
    return [_override(key, value) for key, value in named.items() if value is not None]


def require_run_name(out: str | None) -> None:
    """Refuse an empty ``--out``.

    Raises
    ------
    UsageError
    """
    if out is not None and not out.strip():
        raise UsageError(f"--out {out!r} given, the name of a new run folder wanted")


@contextmanager
def new_run_folder(out: str | None, preset: str) -> Iterator[str]:
    """Hand out the folder of a new run: ``out``, or the next of the preset, for this run alone.

    Raises
    ------
    TwellError
        If no run can be made there.
    """
    from twell_numba.train.run_folder import RunFolder, reserved_run_path

    with nullcontext(out) if out is not None else reserved_run_path(preset) as folder:
        RunFolder(folder).require_new()
        yield str(folder)


def refuse_with_resume(options: Mapping[str, str | None]) -> None:
    """Refuse what a resumed run takes from its own folder.

    Raises
    ------
    UsageError
    """
    for option, value in options.items():
        if value is not None:
            raise UsageError(
                f"{option} {value} given with --resume, which goes on with the run's own settings "
                f"in its own folder; leave it out, or start a new run without --resume"
            )


def run_and_print(
    config: "TrainConfig", folder: str, *, resume: bool, quiet: bool, device: str, as_json: bool
) -> None:
    """Train, and print the summary."""
    from twell_numba.device.memory import keep_freed_memory
    from twell_numba.train.loop import train
    from twell_numba.train.report import Reporter, closing_lines, print_summary

    keep_freed_memory()
    report = Reporter() if quiet else None
    summary = train(config, folder, resume=resume, report=report, device=device)
    if as_json:
        click.echo(to_json({"run": folder, **summary}, indent=2))
    else:
        print_summary(summary)
    if not quiet:
        for line in closing_lines(config, folder):
            note(line)


def _override(key: str, value: str | int) -> str:
    # Quoted, so that a path keeps blanks and quotes of its own.
    written = json.dumps(value, ensure_ascii=False) if key == "data" else value
    return f"{key}={written}"
