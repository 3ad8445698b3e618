"""The folder of one training run.

===========================  =================================================================
``config.toml``              all settings
``metrics.jsonl``            one JSON object a logged step
``samples/step-N.txt``       text written by the model after step N
``checkpoints/step-N/``      the model as other tools open it, and what resuming needs
``before.json``              figures of the model that the run goes on from, if there is one
``summary.json``             the finished run's figures
``.lock``                    empty; locked by the process that is training
===========================  =================================================================
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from twell_numba.atomic import write_file_atomically, write_folder_atomically
from twell_numba.errors import TwellError
from twell_numba.models.checkpoint import (
    CHECKPOINTS_NAME,
    SETTINGS_NAME,
    checkpoint_steps,
    run_of_checkpoints,
)
from twell_numba.strict_json import to_json
from twell_numba.train.config import TrainConfig, from_settings, read_toml
from twell_numba.train.run_lock import locked

# What a write that was killed leaves behind.
_LEFTOVER_NAME = re.compile(r"\.[0-9a-f]+\.step-\d+")


class RunFolder:
    """Reads and writes the files of a run.

    Parameters
    ----------
    path : path
        Need not exist yet; see :meth:`new` and :meth:`require`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / SETTINGS_NAME
        self.metrics_path = self.path / "metrics.jsonl"
        self.before_path = self.path / "before.json"
        self.summary_path = self.path / "summary.json"
        self.samples_path = self.path / "samples"
        self.checkpoints_path = self.path / CHECKPOINTS_NAME
        self.lock_path = self.path / ".lock"

    def refuse_existing(self) -> None:
        """Refuse a path at which there is anything but an empty folder, or a run's checkpoints.

        Raises
        ------
        TwellError
        """
        if (run := run_of_checkpoints(self.path)) is not None:
            raise TwellError(
                f"{self.path} lies among the checkpoints of the run {run}, which would then go on "
                f"from it; name another run folder"
            )
        with _named_errors(self.path):
            if not os.path.lexists(self.path):
                return
            if self.path.is_dir() and not any(self.path.iterdir()):
                return
            hint = self._what_stands_there()
        raise TwellError(f"{self.path} exists already; name another run folder ({hint})")

    def require_new(self) -> None:
        """Refuse a path at which no new run can be made; leaves everything as it is.

        Raises
        ------
        TwellError
            If there is anything but an empty folder, or the file system refuses.
        """
        self.refuse_existing()
        missing = _missing_folders(self.path)
        try:
            with _named_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.path).close()
        finally:
            _remove_empty_folders(missing)

    @contextmanager
    def new(self, config: TrainConfig) -> Iterator[None]:
        """Make the folder, with the settings in it, for a run that goes on in the ``with`` block.

        If the block fails before the run has written anything more, the folder is taken away again.

        Raises
        ------
        TwellError
            If it exists with something in it, or the file system refuses.
        """
        self.refuse_existing()
        missing = _missing_folders(self.path)
        with _named_errors(self.path):
            # Fails if another process was faster, whose folder is then left alone.
            self.samples_path.mkdir(parents=True)
        try:
            with _named_errors(self.path):
                self.checkpoints_path.mkdir()
            self.write_config(config)
            yield
        except BaseException:
            self._remove_if_unused(missing)
            raise

    def create(self, config: TrainConfig) -> None:
        """Make the folder and write the settings into it.

        Raises
        ------
        TwellError
            As :meth:`new`.
        """
        with self.new(config):
            pass

    def require(self) -> None:
        """Refuse a path that is not a run folder.

        Raises
        ------
        TwellError
        """
        if not self.path.is_dir():
            raise TwellError(f"no run folder at {self.path}; give one that 'twell train' made")
        if not self.config_path.is_file():
            raise TwellError(
                f"{self.path} is not a run folder (it has no config.toml); "
                f"give one that 'twell train' made"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training this run, in a ``with`` block.

        Raises
        ------
        TwellError
            If one is doing so already, or the folder cannot be written.
        """
        with ExitStack() as held:
            with _named_errors(self.path):
                held.enter_context(locked(self.lock_path))
            yield

    def write_config(self, config: TrainConfig) -> None:
        """Write ``config.toml``."""
        with write_file_atomically(self.config_path) as temporary:
            temporary.write_text(config.to_toml(), encoding="utf-8")

    def read_config(self) -> TrainConfig:
        """Return the run's settings.

        Raises
        ------
        TwellError
            If this is not a run folder, or its settings are damaged or incomplete.
        """
        self.require()
        settings = read_toml(self.config_path)
        try:
            return complete_settings(settings)
        except MissingSettingsError as error:
            raise TwellError(
                f"{self.config_path}: {error}; put back what the run was begun with "
                f"('settings' in its checkpoints' training_state.json)"
            ) from None

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with (
            _named_errors(self.metrics_path),
            self.metrics_path.open("a", encoding="utf-8") as file,
        ):
            file.write(to_json(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all whole lines of ``metrics.jsonl``; a last line that was cut off is left out."""
        if not self.metrics_path.exists():
            return []
        rows = []
        with _named_errors(self.metrics_path):
            lines = self.metrics_path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
        return rows

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of later steps, which a resumed run will write again."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        with write_file_atomically(self.metrics_path) as temporary:
            temporary.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")

    def write_sample(self, step: int, text: str) -> None:
        """Write ``samples/step-N.txt``."""
        path = self.samples_path / f"step-{step}.txt"
        with _named_errors(path):
            self.samples_path.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``; an infinite perplexity becomes null, as JSON has no infinity."""
        with write_file_atomically(self.summary_path) as temporary:
            temporary.write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")

    def write_before(self, before: Mapping[str, Any]) -> None:
        """Write ``before.json``."""
        with write_file_atomically(self.before_path) as temporary:
            temporary.write_text(to_json(before, indent=2) + "\n", encoding="utf-8")

    def read_before(self) -> dict[str, Any] | None:
        """Return what ``before.json`` holds; None if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            before = json.loads(self.before_path.read_text(encoding="utf-8"))
            if isinstance(before, dict):
                return before
        return None

    def checkpoint_path(self, step: int) -> Path:
        """Return where the checkpoint of a step is or will be."""
        return self.checkpoints_path / f"step-{step}"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, ascending."""
        return sorted(checkpoint_steps(self.checkpoints_path))

    def latest_checkpoint(self) -> tuple[int, Path]:
        """Return the step and path of the newest checkpoint.

        Raises
        ------
        TwellError
            If there is none.
        """
        steps = checkpoint_steps(self.checkpoints_path)
        if not steps:
            raise TwellError(
                f"{self.path} holds no checkpoint to go on from; "
                f"remove it and start again, or start again with another --out"
            )
        return max(steps), steps[max(steps)]

    def remove_leftovers(self) -> None:
        """Delete half-written checkpoints of a process that was killed."""
        if self.checkpoints_path.is_dir():
            for path in self.checkpoints_path.iterdir():
                if _LEFTOVER_NAME.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def new_checkpoint(self, step: int, keep: int) -> Iterator[Path]:
        """Yield a folder to fill; it becomes the checkpoint of ``step`` as a whole or not at all.

        Once it is in place, all but the ``keep`` newest checkpoints up to it are deleted.

        Raises
        ------
        TwellError
            If the file system refuses; checkpoints that were there before stay.
        """
        with write_folder_atomically(self.checkpoint_path(step)) as temporary:
            yield temporary
        for old in [number for number in self.checkpoint_steps() if number <= step][:-keep]:
            shutil.rmtree(self.checkpoint_path(old), ignore_errors=True)

    def _what_stands_there(self) -> str:
        if not self.config_path.is_file():
            return "it is left as it is"
        if self.checkpoint_steps():
            return f"go on with it by 'twell train --resume {shlex.quote(str(self.path))}'"
        return "its run has saved no checkpoint to go on from; if it is not training, remove it"

    def _remove_if_unused(self, created: list[Path]) -> None:
        """Delete what :meth:`new` made, if nothing was added to it."""
        files = {self.config_path, self.lock_path, self.before_path}
        folders = {self.samples_path, self.checkpoints_path}
        with contextlib.suppress(OSError):
            used = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
            if used or set(self.path.iterdir()) - files - folders:
                return
            for file in files:
                file.unlink(missing_ok=True)
            _remove_empty_folders([*folders, *created])


class MissingSettingsError(TwellError):
    """A table of settings lacks some; :func:`complete_settings` never takes defaults for them."""


# Settings that runs of earlier versions did not have. Their defaults do what those versions did.
ADDED_SETTINGS = frozenset(
    {
        "l1_weight",
        "l1_block",
        "block_size",
        "weight_threshold",
        "target_density",
        "target_density_step",
        "sparse_from",
        "sparse_format",
        "precision",
        "recompute",
        "deterministic",
        "activation",
        "initial_model",
    }
)


def complete_settings(settings: Any) -> TrainConfig:
    """Return valid settings from a table that must name every one but :data:`ADDED_SETTINGS`.

    Raises
    ------
    MissingSettingsError
        If one is missing.
    TypeError
        If it is not a table.
    UsageError
        An unknown key, or a value of the wrong type or range.
    """
    if not isinstance(settings, dict):
        raise TypeError(f"settings={settings!r} given, a table wanted")
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    known_later = settings.keys() | ADDED_SETTINGS
    if missing := [name for name in names if name not in known_later]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingSettingsError(f"no {missing[0]}{more} given")
    return from_settings(settings)


def next_run_path(preset: str, parent: str | os.PathLike[str] = "runs") -> Path:
    """Return ``runs/PRESET-N`` with the smallest N, from 1, above those taken."""
    folder = Path(parent)
    pattern = re.compile(re.escape(preset) + r"-(\d+)")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = [int(match[1]) for match in map(pattern.fullmatch, names) if match]
    return folder / f"{preset}-{max(taken, default=0) + 1}"


@contextmanager
def reserved_run_path(preset: str, parent: str | os.PathLike[str] = "runs") -> Iterator[Path]:
    """Make the folder of :func:`next_run_path`, for this process alone.

    It is taken away at the end of the ``with`` block if nothing is in it.

    Raises
    ------
    TwellError
        If the file system refuses.
    """
    path = next_run_path(preset, parent)
    missing = _missing_folders(path)
    with _named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:  # another process was faster
                path = next_run_path(preset, parent)
    try:
        yield path
    finally:
        _remove_empty_folders([path, *missing[1:]])


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> TwellError:
    reason = error.strerror or str(error)
    is_full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
    advice = "free some space" if is_full else "check the path and its permissions"
    return TwellError(f"cannot use {path}: {reason}; {advice}, or name another place")


def _missing_folders(path: Path) -> list[Path]:
    """Return which of a path and its parents do not exist, the path itself first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def _remove_empty_folders(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
