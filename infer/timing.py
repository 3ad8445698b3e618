"""Times of calls that are compared with each other, in one process.

Everything that is compared runs in turn, round after round, and the median over the rounds counts.
On the CPU there is a pause before each timed call, so that no other library's idle threads still
spin, and one call that is not timed, so that all find their operands and threads as they left them.
On a GPU the time between two events is taken, of work that is recorded in a graph: what the GPU
does, not how long the host takes to ask for it.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twell_numba.device.energy import EnergyCounter
    from twell_numba.device.gpu import Stream

# Longer than OpenBLAS's idle threads spin after a call (105 ms, OpenBLAS 0.3.31).
PAUSE_SECONDS = 0.12

# On a GPU: work that is shorter is repeated, so that the start of a graph (5 to 10 us) hardly
# counts; but not more often than that.
SHORTEST_MILLISECONDS = 0.5
# Longer ones are not run once untimed before each time.
LONG_MILLISECONDS = 50.0
MOST_REPEATS = 50

# For how long work is repeated whose energy is measured: the counter changes every 20 to 100 ms.
ENERGY_SECONDS = 3.0


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


def time_in_turn_on_gpu(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    stream: "Stream",
    unrecorded: Collection[str] = (),
) -> dict[str, float]:
    """Return the median milliseconds for which each call keeps a GPU busy.

    Parameters
    ----------
    calls : mapping of str to callable
        Each gives work to the stream.
    rounds : int
        Timed runs of each; before each there is one that is not timed.
    stream : Stream
    unrecorded : collection of str
        Names of calls that cannot be recorded in a graph, because they wait for the GPU or another
        library gives their work. They are called again for each run.
    """
    work = {
        name: _GPUWork(call, stream, is_recorded=name not in unrecorded)
        for name, call in calls.items()
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, each in work.items():
            milliseconds[name].append(each.time())
    return {name: median(times) for name, times in milliseconds.items()}


def energy_in_turn_on_gpu(
    calls: Mapping[str, Callable[[], object]], stream: "Stream", counter: "EnergyCounter"
) -> dict[str, float]:
    """Return the millijoules that a GPU takes for each call, one after the other.

    Parameters
    ----------
    calls : mapping of str to callable
        Each gives work to the stream that can be recorded in a graph.
    stream : Stream
    counter : EnergyCounter
        Of the stream's GPU, which nothing else should use.
    """
    energy = {}
    for name, call in calls.items():
        work = _GPUWork(call, stream, is_recorded=True)
        run, milliseconds = work.run, work.time() * work.repeats
        energy[name] = energy_of(run, milliseconds, stream, counter) / work.repeats
    return energy


def energy_of(
    run: Callable[[], object], milliseconds: float, stream: "Stream", counter: "EnergyCounter"
) -> float:
    """Return the millijoules of a run that takes so many milliseconds, the mean of many."""
    run()
    stream.synchronize()
    before = counter.millijoules()
    runs = math.ceil(1e3 * ENERGY_SECONDS / max(milliseconds, 1e-3))
    for _ in range(runs):
        run()
    stream.synchronize()
    return (counter.millijoules() - before) / runs


class _GPUWork:
    """A call's work, as often in a row as makes it long enough to be timed.

    Attributes
    ----------
    repeats : int
        Calls in a row.
    run : callable
        Gives them to the stream.
    """

    def __init__(self, call: Callable[[], object], stream: "Stream", *, is_recorded: bool) -> None:
        self._call, self._stream, self._is_recorded = call, stream, is_recorded
        for _ in range(3):  # compilation, plans, and what a call learns for the next
            call()
        self._repeat(1)
        self._is_long = False
        milliseconds = self.time()
        self._is_long = milliseconds > LONG_MILLISECONDS
        shorter = SHORTEST_MILLISECONDS / max(milliseconds, 1e-3)
        if shorter > 1:
            self._repeat(min(math.ceil(shorter), MOST_REPEATS))

    def _repeat(self, repeats: int) -> None:
        def run() -> None:
            for _ in range(repeats):
                self._call()

        self.repeats, self.run = repeats, run
        if self._is_recorded:
            from twell_numba.device.gpu import record_graph

            with record_graph(self._stream) as graph:
                run()
            self.run = graph.replay

    def time(self) -> float:
        """Return the milliseconds of one call."""
        if not self._is_long:
            self.run()
        before = self._stream.record(timing=True)
        self.run()
        return self._stream.record(timing=True).milliseconds_since(before) / self.repeats
