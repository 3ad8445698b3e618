"""The thread pool: every range is run once, errors come back, nothing hangs."""

import os
import sys
import threading
import time

import numpy as np
import pytest

from twell_numba.device import run_ranges, set_thread_count, thread_count
from twell_numba.errors import UsageError


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = thread_count()
    set_thread_count(request.param)
    yield request.param
    set_thread_count(before)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize("grain", [1, 3, 100])
@pytest.mark.parametrize("parts_per_thread", [1, 8])
@pytest.mark.usefixtures("threads")
def test_ranges_cover_everything_once(count, grain, parts_per_thread):
    visits = np.zeros(count, int)

    def visit(start, stop):
        visits[start:stop] += 1

    run_ranges(visit, count, grain=grain, parts_per_thread=parts_per_thread)
    assert (visits == 1).all()


def test_little_work_stays_in_the_calling_thread(threads):
    names = []
    run_ranges(lambda start, stop: names.append(threading.get_ident()), 199, grain=100)
    assert names == [threading.get_ident()]


def test_several_threads_share_the_work():
    before = thread_count()
    set_thread_count(2)
    try:
        both_are_here = threading.Barrier(2, timeout=10)
        run_ranges(lambda start, stop: both_are_here.wait(), 2)
    finally:
        set_thread_count(before)


@pytest.mark.parametrize("failing", [0, 3])
@pytest.mark.usefixtures("threads")
def test_an_error_reaches_the_caller_and_the_pool_goes_on(failing):
    def task(start, stop):
        if start <= failing < stop:
            raise ArithmeticError("in a task")

    with pytest.raises(ArithmeticError, match="in a task"):
        run_ranges(task, 4)
    run_ranges(lambda start, stop: None, 4)


@pytest.mark.usefixtures("threads")
def test_a_task_may_run_ranges_itself():
    visits = np.zeros((6, 50), int)

    def row(start, stop):
        for i in range(start, stop):

            def visit(first, last, i=i):
                visits[i, first:last] += 1

            run_ranges(visit, 50)

    run_ranges(row, 6)
    assert (visits == 1).all()


@pytest.mark.usefixtures("threads")
def test_several_callers_at_once():
    visits = np.zeros((4, 100), int)

    def caller(row):
        def visit(start, stop):
            time.sleep(0.001)
            visits[row, start:stop] += 1

        run_ranges(visit, 100, parts_per_thread=4)

    callers = [threading.Thread(target=caller, args=(row,)) for row in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=30)
    assert (visits == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    run_ranges(lambda start, stop: None, 4)
    child = os.fork()
    if child == 0:
        visited = []
        run_ranges(lambda start, stop: visited.append(stop - start), 4)
        os._exit(0 if sum(visited) == 4 else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_a_wrong_thread_count_is_refused():
    with pytest.raises(ValueError, match="thread count 0 given, at least 1 wanted"):
        set_thread_count(0)


@pytest.fixture
def asked_anew(monkeypatch):
    monkeypatch.setattr("twell_numba.device.threads._thread_count", None)


@pytest.mark.parametrize(
    "written",
    ["0", "-1", "many", "1e3", "2.0", "+2", "1_0", "²", "٢", "5000", "9" * 5000],
    ids=lambda text: text[:30],
)
@pytest.mark.usefixtures("asked_anew")
def test_a_wrong_number_of_threads_in_the_environment_is_refused(monkeypatch, written):
    monkeypatch.setenv("TWELL_NUM_THREADS", written)
    with pytest.raises(UsageError, match="TWELL_NUM_THREADS='.* given") as caught:
        thread_count()
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["3", " 3", "3\n", "03"])
@pytest.mark.usefixtures("asked_anew")
def test_a_number_of_threads_in_the_environment_is_taken(monkeypatch, written):
    monkeypatch.setenv("TWELL_NUM_THREADS", written)
    assert thread_count() == 3


@pytest.mark.parametrize("written", ["", "  "])
@pytest.mark.skipif(sys.platform != "linux", reason="the cores of a process are Linux's")
@pytest.mark.usefixtures("asked_anew")
def test_an_empty_number_of_threads_is_none(monkeypatch, written):
    monkeypatch.setenv("TWELL_NUM_THREADS", written)
    assert thread_count() == len(os.sched_getaffinity(0))
