"""How work on a GPU is timed: on a clock that stands for one, and with ``-m gpu`` on a real one."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from twell_numba.infer.timing import MOST_REPEATS, energy_in_turn_on_gpu, time_in_turn_on_gpu


class Clock:
    """Stands for a GPU: work takes the milliseconds it says, the start of a graph 0.01."""

    def __init__(self):
        self.now = 0.0
        self.order = []
        self.recording = None

    def work(self, name, milliseconds):
        def call():
            if self.recording is None:
                self.order.append(name)
                self.now += milliseconds
            else:
                self.recording.append((name, milliseconds))

        return call

    def record(self, *, timing):
        assert timing
        event = SimpleNamespace(time=self.now)
        event.milliseconds_since = lambda earlier: event.time - earlier.time
        return event

    def synchronize(self):
        pass

    @contextmanager
    def record_graph(self, stream):
        assert stream is self
        self.recording = recorded = []

        def replay():
            self.now += 0.01
            for name, milliseconds in recorded:
                self.work(name, milliseconds)()

        yield SimpleNamespace(replay=replay)
        self.recording = None


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("twell_numba.device.gpu.record_graph", clock.record_graph)
    return clock


def test_short_work_is_repeated_in_its_graph(clock):
    times = time_in_turn_on_gpu(
        {"long": clock.work("long", 3.0), "short": clock.work("short", 0.02),
         "nothing": clock.work("nothing", 0.0)},
        rounds=3,
        stream=clock,
    )  # fmt: skip
    assert times["long"] == pytest.approx(3.01)
    assert times["short"] == pytest.approx(0.02, rel=0.05)
    assert times["nothing"] == pytest.approx(0.01 / MOST_REPEATS)


def test_work_runs_in_turn_and_unrecorded_where_it_must(clock):
    calls = {name: clock.work(name, 1.0) for name in ("recorded", "unrecorded")}
    times = time_in_turn_on_gpu(calls, 4, clock, unrecorded={"unrecorded"})
    assert times == {"recorded": pytest.approx(1.01), "unrecorded": pytest.approx(1.0)}
    assert clock.order[-8:] == 2 * (2 * ["recorded"] + 2 * ["unrecorded"])


def test_energy_is_that_of_one_call(clock):
    """Work takes 2 W here, so 2 mJ a millisecond, and so does the start of a graph."""
    counter = SimpleNamespace(millijoules=lambda: 2 * clock.now)
    calls = {"long": clock.work("long", 30.0), "short": clock.work("short", 0.02)}
    energy = energy_in_turn_on_gpu(calls, clock, counter)
    assert energy["long"] == pytest.approx(2 * 30.01)
    assert energy["short"] == pytest.approx(2 * 0.02, rel=0.05)


def test_energy_is_measured_for_seconds(clock):
    asked = []
    counter = SimpleNamespace(millijoules=lambda: asked.append(clock.now) or 0)
    energy_in_turn_on_gpu({"short": clock.work("short", 0.02)}, clock, counter)
    before, after = asked
    assert 3000 <= after - before < 3100


@pytest.mark.gpu
def test_a_large_copy_takes_the_longer(real_gpu):
    from twell_numba.device.gpu import zeros

    small, large = (zeros(size, np.float32, real_gpu.stream) for size in (2**10, 2**26))
    calls = {"small": small.fill_with_zeros, "large": large.fill_with_zeros}
    times = time_in_turn_on_gpu(calls, 5, real_gpu.stream)
    assert 0 < times["small"] < times["large"] < 100
