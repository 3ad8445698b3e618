"""Why a file or folder cannot be read, in one line with advice."""

import errno
import os
import stat
from pathlib import Path

from twell_numba.errors import TwellError

GGUF_MAGIC = b"GGUF"
GGUF_SUFFIX = ".gguf"
_GET_PERMISSION = "get permission to read it and to enter its folders"
_CHECK_PATH = "check the path"
_ADVICE = {
    errno.EACCES: _GET_PERMISSION,
    errno.EPERM: _GET_PERMISSION,
    errno.EISDIR: "give a file",
    errno.ENOENT: _CHECK_PATH,
    errno.ENOTDIR: _CHECK_PATH,
    errno.ENAMETOOLONG: _CHECK_PATH,
    errno.ELOOP: "make its symbolic links lead to something",
}


def unreadable(path: str | os.PathLike[str], error: OSError) -> TwellError:
    """Return the error to raise for a file or folder that the system does not let us read."""
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0, "check the disk, or give another")
    return TwellError(f"cannot read {os.fspath(path)}: {reason}; {advice}")


def exists(path: str | os.PathLike[str]) -> bool:
    """Say whether there is anything at a path.

    Unlike ``Path.exists``, of which it depends on Python's version, this and its siblings never
    take a refusal of the system for a no.

    Raises
    ------
    TwellError
        If the system refuses to say.
    """
    return _mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Say whether a path leads to a regular file: no folder, pipe or device.

    Raises
    ------
    TwellError
        If the system refuses to say.
    """
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Say whether a path leads to a folder.

    Raises
    ------
    TwellError
        If the system refuses to say.
    """
    return stat.S_ISDIR(_mode(path) or 0)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Say whether a path leads to a GGUF file, by its name or by how it begins.

    Raises
    ------
    TwellError
        If the system refuses to say.
    """
    path = Path(path)
    if not is_file(path):
        return False
    if path.suffix.lower() == GGUF_SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError as error:
        raise unreadable(path, error) from error


def require_readable(path: Path) -> None:
    """Refuse a file that cannot be opened; one that is missing is left to who reads it.

    The safetensors library calls both missing.

    Raises
    ------
    TwellError
    """
    if not is_file(path):
        return
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from error


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a zero byte, which no path holds
        return None
    except OSError as error:
        raise unreadable(path, error) from error
