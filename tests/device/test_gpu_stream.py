"""What streams ask of the driver, which is a stand-in."""

import types

import pytest

from twell_numba.device.gpu import driver, stream
from twell_numba.device.gpu.stream import LEGACY_DEFAULT, Stream

EVENT = "an event"


class Driver:
    """Notes the functions that are called; all succeed."""

    CUevent_flags = types.SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)

    def __init__(self):
        self.calls = []

    def __getattr__(self, function):
        def note(*arguments):
            self.calls.append((function, *arguments))
            return (0, EVENT) if function == "cuEventCreate" else (0,)

        return note


class OwnStream(Stream):
    """A stream without a GPU."""

    def __init__(self, handle):
        self.gpu = types.SimpleNamespace(make_current=lambda: None)
        self.handle = handle


@pytest.fixture
def calls(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(stream, "bindings", lambda: stand_in)
    monkeypatch.setattr(driver, "bindings", lambda: stand_in)
    return stand_in.calls


@pytest.mark.parametrize(
    ("work", "recorded_on", "waiting"),
    [
        (lambda: OwnStream(70).wait(OwnStream(80)), 80, 70),
        (lambda: OwnStream(70).wait_for_foreign(LEGACY_DEFAULT), LEGACY_DEFAULT, 70),
        (lambda: OwnStream(70).hand_over_to_foreign(LEGACY_DEFAULT), 70, LEGACY_DEFAULT),
    ],
    ids=["wait", "wait for foreign", "hand over to foreign"],
)
def test_an_event_lives_until_the_wait_is_asked_for(calls, work, recorded_on, waiting):
    work()
    assert calls == [
        ("cuEventCreate", 2),
        ("cuEventRecord", EVENT, recorded_on),
        ("cuStreamWaitEvent", waiting, EVENT, 0),
        ("cuEventDestroy", EVENT),
    ]


def test_a_stream_does_not_wait_for_itself(calls):
    OwnStream(70).wait_for_foreign(70)
    OwnStream(70).hand_over_to_foreign(70)
    assert calls == []
