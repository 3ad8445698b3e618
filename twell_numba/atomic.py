"""Writing files and folders so that a kill or a full disk never leaves half of one.

Everything is written under a temporary name beside the destination, synced to the disk, and
renamed: a reader sees either what was there before or the whole of what is new. A process killed
before the rename leaves nothing but a hidden file or folder, ``.<random>.<name>``, which may be
deleted.

Missing parent folders are made. A symbolic link is followed, not replaced. A new file or folder
has the permissions that the user's umask gives, whoever wrote it.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twell_numba.errors import TwellError

_FREE_SPACE = "free some space or name another place"
_GET_PERMISSION = "get permission to write there or name another place"
_OTHER_NAME = "name another place"
_ADVICE = {
    errno.ENOSPC: _FREE_SPACE,
    getattr(errno, "EDQUOT", errno.ENOSPC): _FREE_SPACE,
    errno.EACCES: _GET_PERMISSION,
    errno.EPERM: _GET_PERMISSION,
    errno.EROFS: _GET_PERMISSION,
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.EEXIST: _OTHER_NAME,
    errno.ENOTDIR: _OTHER_NAME,
    errno.EISDIR: _OTHER_NAME,
    errno.ENOTEMPTY: _OTHER_NAME,
    errno.EFBIG: "name a place that takes larger files, or raise the limit (ulimit -f)",
}


@contextmanager
def write_file_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary empty file to fill; it becomes ``path`` when the ``with`` block ends well.

    If the block raises, the temporary file is removed and ``path`` is left as it was.

    Raises
    ------
    TwellError
        If the file system refuses (disk full, no permission), or ``path`` is a folder, a device or
        a pipe: one line naming path and reason.
    """
    destination = Path(os.path.realpath(path))
    if os.path.lexists(destination) and not destination.is_file():
        # Renaming would put a file in the place of a device or a pipe.
        raise TwellError(
            f"cannot write {os.fspath(path)}: it is not a regular file; name another place"
        )
    temporary = _temporary_name(destination)
    with _file_system_errors_named(path, temporary):
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        try:
            yield temporary
            # A library that fills the file may have made it anew, with permissions of its own.
            temporary.chmod(mode)
            _sync(temporary)
            os.replace(temporary, destination)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync(destination.parent)


@contextmanager
def write_folder_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes ``path`` when the ``with`` block ends well.

    A folder that already stands at ``path`` is replaced, and is put back if that fails. If the
    block raises, the temporary folder is removed and ``path`` is left as it was.

    Raises
    ------
    TwellError
        If the file system refuses (disk full, no permission): one line naming path and reason.
    """
    destination = Path(os.path.realpath(path))
    temporary = _temporary_name(destination)
    with _file_system_errors_named(path, temporary):
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            yield temporary
            _sync_tree(temporary)
            _replace_folder(temporary, destination)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(destination.parent)


@contextmanager
def _file_system_errors_named(path: str | os.PathLike[str], temporary: Path) -> Iterator[None]:
    """Name the destination in errors, and never the temporary name, which means nothing later."""
    name = os.path.basename(os.path.realpath(path))
    try:
        yield
    except OSError as error:
        code = _error_number(error)
        reason = error.strerror or (os.strerror(code) if code else str(error))
        reason = reason.replace(temporary.name, name)
        advice = _ADVICE.get(code, "check the disk or name another place")
        raise TwellError(
            f"cannot write {os.fspath(path)}: {reason}; what was there before is unchanged, "
            f"{advice}"
        ) from error
    except TwellError as error:
        # Of a file inside a temporary folder.
        error.args = tuple(
            part.replace(temporary.name, name) if isinstance(part, str) else part
            for part in error.args
        )
        raise


def _error_number(error: OSError) -> int:
    """Return an error's ``errno``; a library may have it in its text only, "(os error 28)"."""
    written = re.search(r"\(os error (\d+)\)", str(error))
    return error.errno or (int(written[1]) if written else 0)


def _temporary_name(destination: Path) -> Path:
    """Name a sibling, on the same file system, that keeps the destination's file extension."""
    return destination.with_name(f".{secrets.token_hex(4)}.{destination.name}")


def _replace_folder(temporary: Path, destination: Path) -> None:
    """Rename ``temporary`` to ``destination``; a folder with contents must first be moved aside."""
    if not destination.is_dir():
        os.rename(temporary, destination)
        return
    previous = _temporary_name(destination)
    os.rename(destination, previous)
    try:
        os.rename(temporary, destination)
    except BaseException:
        os.rename(previous, destination)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's list of names, are on the disk."""
    if path.is_dir():
        # Windows cannot open a folder; there is nothing to sync then.
        with suppress(PermissionError):
            _sync_descriptor(os.open(path, os.O_RDONLY))
    else:
        _sync_descriptor(os.open(path, os.O_RDWR))


def _sync_descriptor(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
