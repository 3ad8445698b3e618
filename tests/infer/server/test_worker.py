"""The engine's thread and the event loop, with an engine that does as it is told."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twell_numba.errors import UsageError
from twell_numba.infer.request import GenerationSettings, Piece, Request
from twell_numba.infer.server.app import check_ends, collect
from twell_numba.infer.server.errors import ApiError
from twell_numba.infer.server.metrics import ServerMetrics
from twell_numba.infer.server.worker import MOST_FAILURES, EngineWorker, Job, merge

PROMPT = np.array([1, 2, 3])


class CountingEngine:
    """Gives every request the texts "0", "1", "2" and so on, one a step, while it may go on."""

    def __init__(self) -> None:
        self.may_step = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.generated_tokens = 0
        self.step_threads: set[int] = set()
        self._lock = threading.Lock()
        self._live: list[tuple[Request, Callable[[Piece], None]]] = []
        self._cancelled: set[Request] = set()

    def submit(self, tokens: Any, settings: Any, on_piece: Callable[[Piece], None]) -> Request:
        if len(tokens) > 10:
            raise UsageError("a prompt of 11 tokens given, at most 10 wanted")
        request = Request(tokens, settings)
        with self._lock:
            self._live.append((request, on_piece))
        return request

    def cancel(self, request: Request) -> None:
        with self._lock:
            self._cancelled.add(request)
        self.may_step.release()

    def step(self) -> bool:
        self.step_threads.add(threading.get_ident())
        with self._lock:
            live = list(self._live)
        if not live:
            return False
        self.may_step.acquire()
        if self.failure is not None:
            self._end_all("error")
            raise self.failure
        for request, on_piece in live:
            number = len(request.tokens)
            if request in self._cancelled:
                request.finish_reason = "cancelled"
            elif number + 1 == request.settings.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason != "cancelled":
                request.tokens.append(number)
                self.generated_tokens += 1
            else:
                number = -1
            text = str(number) if number >= 0 else ""
            on_piece(Piece(text, (number,) if text else (), (), request.finish_reason))
        with self._lock:
            self._live = [pair for pair in self._live if not pair[0].is_finished]
            return bool(self._live)

    def _end_all(self, reason: str) -> None:
        with self._lock:
            for request, on_piece in self._live:
                request.finish_reason, request.error = reason, repr(self.failure)
                on_piece(Piece("", finish_reason=reason))
            self._live = []


def run_with_worker(
    scenario: Callable[[CountingEngine, EngineWorker], Any], most_requests: int = 4
) -> CountingEngine:
    """Run a scenario beside a worker, and end both."""
    engine = CountingEngine()

    async def whole() -> None:
        worker = EngineWorker(engine, ServerMetrics(), most_requests)  # type: ignore[arg-type]
        worker.start()
        try:
            await asyncio.wait_for(scenario(engine, worker), 20)
        finally:
            worker.close()
            for _ in range(1000):
                engine.may_step.release()
            await asyncio.to_thread(worker.join, 10)
            assert not worker._thread.is_alive()

    asyncio.run(whole())
    return engine


def texts(count: int, *, length: int = 3) -> list[tuple[np.ndarray, GenerationSettings]]:
    return [(PROMPT, GenerationSettings(max_new_tokens=length))] * count


def release(engine: CountingEngine, steps: int) -> None:
    for _ in range(steps):
        engine.may_step.release()


async def settle(worker: EngineWorker, job: Job) -> None:
    """Wait until a job has ended as the event loop sees it."""
    while any(live.job is job for live in worker._live):
        await asyncio.sleep(0.01)


def test_pieces_of_every_text_arrive_in_order_and_apart() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        job = worker.submit([*texts(2, length=5), *texts(1, length=2)])
        release(engine, 5)
        pieces = await collect(job)
        assert [piece.text for piece in pieces] == ["01234", "01234", "01"]
        assert [piece.tokens for piece in pieces][2] == (0, 1)
        assert {piece.finish_reason for piece in pieces} == {"length"}
        assert await job.inbox.take() == []

    engine = run_with_worker(scenario)
    assert len(engine.step_threads) == 1
    assert engine.step_threads != {threading.get_ident()}


def test_a_reader_that_is_slow_finds_its_pieces_merged() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        job = worker.submit(texts(2, length=4))
        release(engine, 4)
        await settle(worker, job)
        taken = dict(await job.inbox.take())
        assert taken == {index: Piece("0123", (0, 1, 2, 3), (), "length") for index in (0, 1)}
        assert await job.inbox.take() == []

    run_with_worker(scenario)


def test_more_than_the_queue_holds_are_refused_and_none_of_them_runs() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        job = worker.submit(texts(3))
        with pytest.raises(ApiError) as caught:
            worker.submit(texts(2))
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) > 0
        with pytest.raises(ApiError) as caught:
            worker.submit(texts(5))
        assert caught.value.status == 400  # however long the client waits
        release(engine, 3)
        await settle(worker, job)
        later = worker.submit(texts(4))
        release(engine, 3)
        assert len(await collect(later)) == 4

    run_with_worker(scenario, most_requests=4)


def test_a_call_of_which_one_text_cannot_run_leaves_nothing_behind() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        too_long = (np.arange(11), GenerationSettings())
        with pytest.raises(ApiError, match="at most 10 wanted") as caught:
            worker.submit([*texts(1, length=1000), too_long])
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        while worker._live:
            await asyncio.sleep(0.01)

    run_with_worker(scenario)


def test_a_cancelled_call_ends_and_the_others_go_on() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        left, kept = worker.submit(texts(1, length=1000)), worker.submit(texts(1))
        worker.cancel(left)
        release(engine, 3)
        assert [piece.text for piece in await collect(kept)] == ["012"]
        (piece,) = await collect(left)
        assert piece.finish_reason == "cancelled"
        with pytest.raises(ApiError) as caught:
            check_ends(left, [piece])
        assert caught.value.status == 503
        assert "twell_texts_finished_total" in worker._metrics.text()

    run_with_worker(scenario)


def test_a_step_that_fails_ends_the_requests_that_ran_and_the_next_one_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        for _ in range(MOST_FAILURES + 1):
            engine.failure = MemoryError("too little")
            job = worker.submit(texts(2))
            release(engine, 1)
            with pytest.raises(ApiError, match="too little") as caught:
                check_ends(job, await collect(job))
            assert caught.value.status == 500
            engine.failure = None
            later = worker.submit(texts(1))
            release(engine, 3)
            assert [piece.text for piece in await collect(later)] == ["012"]

    run_with_worker(scenario)
    assert caplog.text.count("MemoryError: too little") == MOST_FAILURES + 1


def test_an_engine_that_fails_again_and_again_ends_the_worker() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        engine.failure = RuntimeError("no device")
        for _ in range(MOST_FAILURES):
            assert worker.is_alive
            job = worker.submit(texts(1))
            release(engine, 1)
            with pytest.raises(ApiError, match="no device"):
                check_ends(job, await collect(job))
        while worker.failure is None:
            await asyncio.sleep(0.01)
        assert worker.failure is engine.failure
        assert not worker.is_alive
        with pytest.raises(ApiError) as caught:
            worker.submit(texts(1))
        assert caught.value.status == 503

    run_with_worker(scenario)


def test_closing_ends_what_runs() -> None:
    async def scenario(engine: CountingEngine, worker: EngineWorker) -> None:
        job = worker.submit(texts(2, length=1000))
        worker.close()
        assert {piece.finish_reason for piece in await collect(job)} == {"cancelled"}
        with pytest.raises(ApiError):
            worker.submit(texts(1))

    run_with_worker(scenario)


def test_merging_keeps_everything_in_order() -> None:
    pieces = [Piece("a", (1,), (), None), Piece("", (2, 3), (), None), Piece("b", (), (), "stop")]
    assert merge(pieces) == Piece("ab", (1, 2, 3), (), "stop")
    assert merge(pieces[:1]) is pieces[0]
