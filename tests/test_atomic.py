"""Files and folders are written whole or not at all."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twell_numba.atomic import write_file_atomically, write_folder_atomically
from twell_numba.errors import TwellError


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


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space or name another place"),
        (getattr(errno, "EDQUOT", errno.ENOSPC), "free some space or name another place"),
        (errno.EACCES, "get permission to write there or name another place"),
        (errno.EROFS, "get permission to write there or name another place"),
        (errno.ENAMETOOLONG, "give it a shorter name"),
        (errno.EIO, "check the disk or name another place"),
    ],
)
@pytest.mark.parametrize("write", [write_file_atomically, write_folder_atomically])
def test_advice_fits_the_error_and_the_temporary_name_is_not_shown(
    tmp_path: Path, write: Callable[..., Any], code: int, advice: str
) -> None:
    with pytest.raises(TwellError) as caught, write(tmp_path / "name") as temporary:
        raise OSError(code, os.strerror(code), str(temporary))
    assert str(caught.value) == (
        f"cannot write {tmp_path / 'name'}: {os.strerror(code)}; what was there before is "
        f"unchanged, {advice}"
    )


def test_an_error_in_a_librarys_words_is_understood(tmp_path: Path) -> None:
    with pytest.raises(TwellError) as caught, write_file_atomically(tmp_path / "name") as temporary:
        raise OSError(f"I/O error: {temporary}: {os.strerror(errno.ENOSPC)} (os error 28)")
    assert str(caught.value).endswith("free some space or name another place")
    assert temporary.name not in str(caught.value)


def test_an_error_of_a_file_in_a_temporary_folder_names_where_it_was_to_be(tmp_path: Path) -> None:
    with (
        pytest.raises(TwellError, match=r"step-1/weights: No space left") as caught,
        write_folder_atomically(tmp_path / "step-1") as folder,
        write_file_atomically(folder / "weights"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert f"cannot write {tmp_path / 'step-1' / 'weights'}: " in str(caught.value)


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


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_folders_pipes_and_devices_are_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path(os.devnull)):
        with (
            pytest.raises(TwellError, match=f"cannot write {path}: it is not a regular file"),
            write_file_atomically(path),
        ):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["folder", "pipe"]


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege")
def test_symbolic_links_are_followed_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name, target in (("file", "elsewhere/new"), ("folder", "elsewhere/step-1")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for _ in range(2):  # to a target that is missing, then to one that is there
        with write_file_atomically(tmp_path / "file") as temporary:
            temporary.write_text("new")
        with write_folder_atomically(tmp_path / "folder") as temporary:
            (temporary / "inside").touch()
    assert (tmp_path / "file").is_symlink()
    assert (tmp_path / "folder").is_symlink()
    assert (tmp_path / "elsewhere" / "new").read_text() == "new"
    assert names(tmp_path / "elsewhere" / "step-1") == ["inside"]
    assert names(tmp_path / "elsewhere") == ["new", "step-1"]
    assert names(tmp_path) == ["elsewhere", "file", "folder"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_permissions_follow_the_umask_whoever_filled_the_file(tmp_path: Path) -> None:
    def remake(path: Path) -> None:
        path.unlink()
        path.touch(mode=0o600)

    before = os.umask(0o027)
    try:
        with write_file_atomically(tmp_path / "file") as temporary:
            remake(temporary)
        with write_folder_atomically(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
