"""One pool of threads for everything this package runs in parallel on the CPU.

Kernels are compiled without Numba's own parallel regions. Numba's pool and BLAS's pool spin while
they wait and take the cores from each other: on 2 cores, the forward pass of a sparse FFN (one BLAS
product, then two kernels) took 16.2 ms with ``prange`` over OpenMP after 2-threaded BLAS, 11.5 ms
with ``prange`` after BLAS in this pool, and 6.4 ms with both in this pool. A thread of this pool
sleeps as soon as it has nothing to do; it runs a kernel or a single-threaded BLAS call
(:mod:`twell_numba.device.blas`) on a range of rows, with the interpreter lock released.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from twell_numba.errors import UsageError

THREADS_VARIABLE = "TWELL_NUM_THREADS"
_MOST_THREADS = 4096

_lock = threading.Lock()
_inside_task = threading.local()
_executor: ThreadPoolExecutor | None = None
_thread_count: int | None = None


def thread_count() -> int:
    """Return how many threads share the work (the calling thread included).

    It is ``TWELL_NUM_THREADS`` if that is set, otherwise the number of cores this process may use.

    Raises
    ------
    UsageError
        If ``TWELL_NUM_THREADS`` is not a number of threads.
    """
    global _thread_count
    if _thread_count is None:
        _thread_count = _default_thread_count()
    return _thread_count


def requested_thread_count() -> int | None:
    """Return the number in ``TWELL_NUM_THREADS``; None if that is not set, or empty.

    Raises
    ------
    UsageError
        If it is not a whole number of at least 1.
    """
    written = os.environ.get(THREADS_VARIABLE, "").strip()
    if not written:
        return None
    # isdecimal alone would let digits of other scripts pass.
    is_number = written.isascii() and written.isdecimal() and len(written) < 10
    if not is_number or not 1 <= int(written) <= _MOST_THREADS:
        shown = written if len(written) <= 40 else f"{written[:37]}..."
        raise UsageError(
            f"{THREADS_VARIABLE}={shown!r} given in the environment, a whole number from 1 to "
            f"{_MOST_THREADS} wanted; set it to one, or unset it to use every core"
        )
    return int(written)


def set_thread_count(count: int) -> None:
    """Let ``count`` threads share the work from the next call on.

    Raises
    ------
    ValueError
        If ``count`` is less than 1.
    """
    global _thread_count, _executor
    if count < 1:
        raise ValueError(f"thread count {count} given, at least 1 wanted")
    with _lock:
        _thread_count = count
        previous, _executor = _executor, None
    if previous is not None:
        previous.shutdown(wait=True)


def run_ranges(
    task: Callable[[int, int], object],
    count: int,
    *,
    grain: int = 1,
    parts_per_thread: int = 1,
) -> None:
    """Call ``task(start, stop)`` on ranges that together cover ``range(count)`` once.

    Parameters
    ----------
    task : callable
        Must write only what belongs to its own range.
    count : int
        Number of items (rows, heads, neurons).
    grain : int
        Fewest items worth a thread of their own. With fewer than ``2 * grain`` items, or when
        called from inside a task, the calling thread does everything, so that tiny work never waits
        for another thread to wake (about 90 us).
    parts_per_thread : int
        With more than one part a thread, threads that finish early take more parts: for uneven
        rows.

    Notes
    -----
    The ranges depend on ``count``, ``grain`` and the number of threads alone, never on timing.
    The first exception a task raises is raised here, after all tasks have ended.
    """
    if count <= 0:
        return
    threads = thread_count()
    parts = min(count // grain, threads * parts_per_thread)
    if parts <= 1 or getattr(_inside_task, "value", False):
        task(0, count)
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    next_part = itertools.count()

    def work() -> None:
        _inside_task.value = True
        try:
            while (part := next(next_part)) < parts:
                task(bounds[part], bounds[part + 1])
        finally:
            _inside_task.value = False

    executor = _get_executor()
    helpers: list[Future[None]] = [executor.submit(work) for _ in range(min(threads, parts) - 1)]
    try:
        work()
    finally:
        errors = [helper.exception() for helper in helpers]
    for error in errors:
        if error is not None:
            raise error


def _default_thread_count() -> int:
    requested = requested_thread_count()
    if requested is not None:
        return requested
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _get_executor() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(max(1, thread_count() - 1), "twell")
        return _executor


def _forget_threads_after_fork() -> None:
    """A forked child has none of its parent's threads; waiting for them would hang."""
    global _executor, _lock
    _lock = threading.Lock()
    _executor = None
    _inside_task.value = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_after_fork)
