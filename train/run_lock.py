"""A lock on a run, so that no two processes write into it at a time.

The operating system holds it for as long as the process lives, so one that is killed leaves nothing
to clean up. The locked file stays, empty: to delete it would let two processes lock two files of
the same name.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twell_numba.errors import TwellError

_HELD_ELSEWHERE = {errno.EAGAIN, errno.EACCES}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made if it is missing, in a ``with`` block.

    A file system without locks is worked on without one.

    Raises
    ------
    TwellError
        If another process, or another part of this one, holds the lock.
    OSError
        If the file cannot be made.
    """
    with path.open("ab") as file:
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                raise TwellError(
                    f"{path.parent} is being trained by another process; "
                    f"wait for it to end, or stop it, then try again"
                ) from None
        yield


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
