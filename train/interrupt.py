"""Being asked to stop: finish the step, save, and say how to go on.

Ctrl-C (SIGINT), SIGTERM, which batch systems and ``kill`` send, and SIGHUP, which a terminal sends
when it closes, do the same; the exit code is that of a program ended by the signal: 130, 143 or
129. A second Ctrl-C stops at once. A second SIGTERM does not: some senders, such as ``timeout``,
send it twice. A signal that the program was started to ignore, as by ``nohup``, stays ignored.
"""

import os
import signal
import sys
from contextlib import ExitStack, suppress
from types import FrameType

from twell_numba.errors import TwellError
from twell_numba.infer.signals import HANG_UPS, handled_signals

_NOTICES: dict[int, bytes] = {
    signal.SIGINT: b"\nfinishing this step, then saving; Ctrl-C again stops at once\n",
    signal.SIGTERM: b"\nasked to terminate: finishing this step, then saving\n",
}
for _number in HANG_UPS:
    _NOTICES[_number] = b"\nthe terminal was closed: finishing this step, then saving\n"


class Interrupted(TwellError):
    """Training was stopped by a signal, and saved; the message holds the command to go on with."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class InterruptFlag:
    """In its ``with`` block, notes a first signal to stop instead of being ended by it.

    A Ctrl-C after that raises KeyboardInterrupt. Signals belong to the main thread; in another one,
    nothing is changed.

    Attributes
    ----------
    signal_number : int or None
        The first signal that came.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._handled = ExitStack()

    @property
    def is_set(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number is not None

    def __enter__(self) -> "InterruptFlag":
        self._handled.enter_context(handled_signals(_NOTICES, self._handle))
        return self

    def __exit__(self, *exception: object) -> None:
        self._handled.close()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if not self.is_set:
            self.signal_number = signal_number
            _notify(_NOTICES[signal_number])
        elif signal_number == signal.SIGINT:
            raise KeyboardInterrupt


def _notify(notice: bytes) -> None:
    """Write to stderr if that can be done: a step that ends in an error would not be saved."""
    stream = sys.__stderr__
    if stream is None or stream.closed:
        return  # its descriptor may belong to another file by now
    with suppress(OSError):
        # Not print: the signal may have come in the middle of another write to that stream.
        os.write(2, notice)
