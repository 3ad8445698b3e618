"""Ctrl-C: once to finish the step and save, twice to stop at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from twell_numba.errors import TwellError

_NOTICE = b"\nfinishing this step, then saving; Ctrl-C again stops at once\n"


class Interrupted(TwellError):
    """Training was stopped by Ctrl-C, and saved; the message holds the command to go on with."""

    exit_code = 130


class InterruptFlag:
    """In its ``with`` block, a first Ctrl-C sets ``is_set``; a second raises KeyboardInterrupt.

    Signals belong to the main thread; in another one, nothing is changed.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> "InterruptFlag":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(signal.SIGINT, self._previous or signal.SIG_DFL)
            self._installed = False

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        # Not print: the signal may have come in the middle of another write to that stream.
        os.write(2, _NOTICE)
