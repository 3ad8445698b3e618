import errno
import os
from pathlib import Path

import pytest

from twell_numba.errors import TwellError
from twell_numba.models.atomic import write_file_atomically, write_folder_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_written_and_replaced(tmp_path: Path) -> None:
    destination = tmp_path / "deep" / "file.json"
    for text in ("first", "second"):
        with write_file_atomically(destination) as temporary:
            assert temporary.suffix == ".json"
            temporary.write_text(text)
        assert destination.read_text() == text
    assert names(destination.parent) == ["file.json"]


def test_folder_is_written_and_replaced(tmp_path: Path) -> None:
    destination = tmp_path / "deep" / "step-1"
    for name in ("first", "second"):
        with write_folder_atomically(destination) as temporary:
            (temporary / "inside").mkdir()
            (temporary / "inside" / name).write_text(name)
        assert names(destination / "inside") == [name]
    assert names(destination.parent) == ["step-1"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_failure_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("kept")
    folder.mkdir()
    (folder / "kept").touch()

    def break_file() -> None:
        with write_file_atomically(file) as temporary:
            temporary.write_text("half")
            raise failure

    def break_folder() -> None:
        with write_folder_atomically(folder) as temporary:
            (temporary / "half").touch()
            raise failure

    pytest.raises(failure, break_file)
    pytest.raises(failure, break_folder)
    assert names(tmp_path) == ["file", "folder"]
    assert file.read_text() == "kept"
    assert names(folder) == ["kept"]


def test_full_disk_is_one_line_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "kept").touch()

    def disk_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", disk_full)
    with (
        pytest.raises(TwellError, match=r"step-1: No space left on device") as caught,
        write_folder_atomically(folder) as temporary,
    ):
        (temporary / "new").touch()
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-1"]
    assert names(folder) == ["kept"]


def test_failed_last_rename_puts_the_previous_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "kept").touch()
    rename = os.rename

    def fail_into_place(source: Path, destination: Path) -> None:
        if destination == folder and (source / "new").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_into_place)
    with pytest.raises(TwellError), write_folder_atomically(folder) as temporary:
        (temporary / "new").touch()
    assert names(tmp_path) == ["step-1"]
    assert names(folder) == ["kept"]


def test_a_file_in_the_way_of_a_folder_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    path.write_text("mine")
    with (
        pytest.raises(TwellError, match="cannot write"),
        write_folder_atomically(path) as temporary,
    ):
        (temporary / "new").touch()
    assert path.read_text() == "mine"
    assert names(tmp_path) == ["step-1"]
