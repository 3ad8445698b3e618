"""Signals that a program takes for a while: by one handler, and put back afterwards."""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What a terminal sends that is closed; there is none on Windows.
HANG_UPS: tuple[int, ...] = () if sys.platform == "win32" else (signal.SIGHUP,)


@contextmanager
def handled_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """In its ``with`` block, call a handler for signals instead of what was done before.

    A signal that is ignored, as SIGHUP is under ``nohup``, stays ignored. Signals belong to the
    main thread; in another one, nothing is changed.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)
