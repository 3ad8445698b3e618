"""Times of calls that are compared with each other, in one process.

Everything that is compared runs in turn, round after round, and the median over the rounds counts.
Before each timed call there is a pause, so that no other library's idle threads still spin, and
one call that is not timed, so that all find their operands and threads as they left them.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

# Longer than OpenBLAS's idle threads spin after a call (105 ms, OpenBLAS 0.3.31).
PAUSE_SECONDS = 0.12


def time_in_turn(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] | None = None,
    pause: bool = True,
    warm_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the median milliseconds of each call.

    Parameters
    ----------
    calls : mapping of str to callable
    rounds : int
        Timed calls of each.
    prepare : callable, optional
        Called before each timed call, outside the timing.
    pause : bool
        Whether to wait before each call until other libraries' threads sleep.
    warm_seconds : float
        For how long each is called before the call that is timed, after a pause. Cores that have
        slept take about 10 ms to their full speed: a call of 2 ms measured at once takes 4.
    """
    for call in calls.values():  # compilation, and what a call learns for the next
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if pause:
                time.sleep(PAUSE_SECONDS)
            _warm_up(call, warm_seconds)
            if prepare is not None:
                prepare()
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * median(times) for name, times in seconds.items()}


def _warm_up(call: Callable[[], object], seconds: float) -> None:
    """Call at least once, and for as long."""
    end = time.perf_counter() + seconds
    call()
    while time.perf_counter() < end:
        call()
