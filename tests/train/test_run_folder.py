"""The run folder: made once, written whole, and never harmed."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twell_numba.errors import TwellError
from twell_numba.train import run_folder, run_lock
from twell_numba.train.config import TrainConfig
from twell_numba.train.run_folder import (
    ADDED_SETTINGS,
    RunFolder,
    next_run_path,
    reserved_run_path,
)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(TrainConfig(seed=5))
    return folder


def save(run, step, keep=2, content="weights"):
    with run.new_checkpoint(step, keep) as folder:
        (folder / "model").write_text(content)


def test_a_new_run_holds_its_settings(run):
    assert run.read_config() == TrainConfig(seed=5)
    assert run.checkpoint_steps() == []


@pytest.mark.parametrize("taken_by", ["file", "folder", "dangling link"])
def test_an_existing_path_is_refused_and_left_as_it_is(tmp_path, taken_by):
    path = tmp_path / "run"
    if taken_by == "file":
        path.write_text("precious")
    elif taken_by == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("precious")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TwellError, match="exists already; name another run folder"):
        RunFolder(path).create(TrainConfig())
    assert [item.name for item in tmp_path.iterdir()] == ["run"]
    assert taken_by != "folder" or [item.name for item in path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("place", ["step-99", "more/run", "."])
def test_the_checkpoints_of_another_run_are_left_alone(run, place):
    """What is added there would be the checkpoint that it goes on from."""
    before = sorted(run.path.rglob("*"))
    other = RunFolder(run.checkpoints_path / place)
    for attempt in (other.require_new, lambda: other.create(TrainConfig())):
        with pytest.raises(TwellError, match="lies among the checkpoints of the run .*/run, ") as e:
            attempt()
        assert "\n" not in str(e.value)
    assert sorted(run.path.rglob("*")) == before
    RunFolder(run.path / "other").create(TrainConfig())


def test_an_existing_run_is_refused_with_the_command_to_go_on(run):
    save(run, 1)
    with pytest.raises(TwellError, match="twell train --resume"):
        RunFolder(run.path).create(TrainConfig())


def test_a_run_without_a_checkpoint_is_no_dead_end(run):
    with pytest.raises(TwellError, match="no checkpoint to go on from; .* remove it") as caught:
        RunFolder(run.path).create(TrainConfig())
    assert "--resume" not in str(caught.value)
    with pytest.raises(TwellError, match="remove it and start again"):
        run.latest_checkpoint()


def test_a_run_that_fails_before_it_wrote_anything_leaves_no_folder(tmp_path):
    def fail(run, write):
        with run.new(TrainConfig()), run.lock():
            assert run.config_path.is_file()
            write(run)
            raise RuntimeError("a failure")

    run = RunFolder(tmp_path / "runs" / "mine")
    with pytest.raises(RuntimeError, match="a failure"):
        fail(run, lambda run: None)
    assert list(tmp_path.iterdir()) == []
    for write in (
        lambda run: run.append_metrics({"step": 1}),
        lambda run: run.write_sample(1, "text"),
        lambda run: save(run, 1),
        lambda run: (run.path / "notes.txt").write_text("precious"),
    ):
        run = RunFolder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
        with pytest.raises(RuntimeError, match="a failure"):
            fail(run, write)
        assert run.read_config() == TrainConfig()


def test_a_folder_that_was_there_stays_when_its_run_fails(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise TwellError("no space")

    monkeypatch.setattr(RunFolder, "write_config", refuse)
    with pytest.raises(TwellError, match="no space"):
        RunFolder(tmp_path).create(TrainConfig())
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_process_that_was_faster_is_left_alone(run, monkeypatch):
    monkeypatch.setattr(RunFolder, "refuse_existing", lambda self: None)
    with pytest.raises(TwellError, match="File exists"):
        RunFolder(run.path).create(TrainConfig(seed=6))
    assert run.read_config() == TrainConfig(seed=5)


def test_whether_a_run_can_be_made_is_told_without_making_it(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    RunFolder(tmp_path / "new" / "run").require_new()
    RunFolder(tmp_path / "empty").require_new()
    for path, reason in (
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path, "exists already"),
    ):
        with pytest.raises(TwellError, match=reason) as caught:
            RunFolder(path).require_new()
        assert str(path) in str(caught.value)
        assert "free some space" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_parent_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(TwellError, match="run: Permission denied"):
        RunFolder(tmp_path / "run").require_new()


def test_settings_that_are_missing_never_become_defaults(run):
    lines = run.config_path.read_text().splitlines(keepends=True)
    run.config_path.write_text("".join(line for line in lines if "learning_rate =" not in line))
    with pytest.raises(TwellError, match=r"config\.toml: no learning_rate given; put back"):
        run.read_config()
    run.config_path.write_text("")
    with pytest.raises(TwellError, match=r"no preset and \d+ more given"):
        run.read_config()


def test_settings_that_a_run_of_the_first_version_did_not_have_take_their_defaults(run):
    lines = run.config_path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.split(" = ")[0] not in ADDED_SETTINGS]
    assert len(lines) - len(kept) == len(ADDED_SETTINGS)
    run.config_path.write_text("".join(kept))
    assert run.read_config().weight_format_after(10**6) == "dense"


def test_an_empty_folder_may_become_a_run(tmp_path):
    RunFolder(tmp_path).create(TrainConfig())
    assert (tmp_path / "config.toml").is_file()


def test_what_is_not_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(TwellError, match="no run folder at"):
        RunFolder(tmp_path / "nowhere").read_config()
    with pytest.raises(TwellError, match="is not a run folder"):
        RunFolder(tmp_path).read_config()


def test_metrics_are_appended_and_later_steps_forgotten(run):
    for step in (1, 10, 20, 30):
        run.append_metrics({"step": step, "loss": 1 / step})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 40, "lo')
    assert [row["step"] for row in run.read_metrics()] == [1, 10, 20, 30]
    run.forget_metrics_after(20)
    run.append_metrics({"step": 30, "loss": 0.5})
    lines = run.metrics_path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 1.0},
        {"step": 10, "loss": 0.1},
        {"step": 20, "loss": 0.05},
        {"step": 30, "loss": 0.5},
    ]


def test_the_newest_checkpoints_are_kept_in_the_order_of_their_steps(run):
    for step in (8, 9, 10, 100):
        save(run, step, keep=2)
    assert run.checkpoint_steps() == [10, 100]
    assert run.latest_checkpoint() == (100, run.checkpoint_path(100))


def test_a_failed_save_leaves_earlier_checkpoints_and_no_half_of_a_new_one(run):
    """Fault 68."""
    save(run, 1)
    save(run, 2)

    def save_to_a_full_disk():
        with run.new_checkpoint(3, 1) as folder:
            (folder / "model").write_text("half of the wei")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TwellError, match="step-3: No space left on device"):
        save_to_a_full_disk()
    assert run.checkpoint_steps() == [1, 2]
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == ["step-1", "step-2"]
    assert (run.checkpoint_path(2) / "model").read_text() == "weights"


def test_what_a_killed_save_left_is_removed(run):
    save(run, 1)
    (run.checkpoints_path / ".0a1b2c3d.step-2").mkdir()
    (run.checkpoints_path / "notes").mkdir()
    assert run.checkpoint_steps() == [1]
    run.remove_leftovers()
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == ["notes", "step-1"]


def test_a_full_disk_is_named_when_a_line_cannot_be_written(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TwellError, match=r"metrics\.jsonl: No space left on device"):
        run.append_metrics({"step": 1})


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TwellError, match="cannot use .*run"):
        RunFolder(tmp_path / "file" / "run").create(TrainConfig())


def test_run_paths_are_numbered(tmp_path):
    parent = tmp_path / "runs"
    assert next_run_path("paper-0.5b", parent) == parent / "paper-0.5b-1"
    for name in ("tiny-1", "tiny-9", "tiny-10", "tiny-x", "small-30"):
        (parent / name).mkdir(parents=True)
    assert next_run_path("tiny", parent) == parent / "tiny-11"


def test_a_reserved_run_path_is_of_one_process_alone(tmp_path, monkeypatch):
    parent = tmp_path / "runs"
    with reserved_run_path("tiny", parent) as first:
        assert first == parent / "tiny-1"
        assert not list(first.iterdir())
        # as seen by a process that looked before this one made its folder
        seen = iter([first, parent / "tiny-2"])
        monkeypatch.setattr(run_folder, "next_run_path", lambda preset, parent: next(seen))
        with reserved_run_path("tiny", parent) as second:
            assert second == parent / "tiny-2"
            RunFolder(second).create(TrainConfig())
        assert second.is_dir()
    assert not first.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    with (
        pytest.raises(TwellError, match="cannot use .*tiny-1"),
        reserved_run_path("tiny", tmp_path / "file"),
    ):
        pass


def test_a_reserved_run_path_that_is_not_used_leaves_nothing(tmp_path):
    with reserved_run_path("tiny", tmp_path / "new" / "runs"):
        pass
    assert not (tmp_path / "new").exists()


def test_numbers_that_are_not_finite_are_null_in_the_files(run):
    run.write_summary({"loss": math.nan, "perplexity": math.inf, "steps": 3})
    assert json.loads(run.summary_path.read_text()) == {
        "loss": None,
        "perplexity": None,
        "steps": 3,
    }
    run.append_metrics({"step": 1, "l1_loss": math.inf})
    assert run.read_metrics() == [{"step": 1, "l1_loss": None}]
    assert "Infinity" not in run.metrics_path.read_text()


def test_a_run_that_is_being_trained_is_refused(run):
    def train_too():
        with RunFolder(run.path).lock():
            pass

    with run.lock(), pytest.raises(TwellError, match="run is being trained by another process"):
        train_too()
    train_too()


def test_a_process_that_is_killed_gives_its_lock_back(run):
    program = (
        "import sys, time\n"
        "from twell_numba.train.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock():\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, run.path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline().strip() == b"locked"
        with pytest.raises(TwellError, match="being trained"), run.lock():
            pass
        process.kill()
    with run.lock():
        pass


def test_a_file_system_without_locks_is_worked_on_without_one(run, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock, "_lock", refuse)
    with run.lock():
        pass
