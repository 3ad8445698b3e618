"""The engine in a thread of its own, and what it hands to the event loop.

Only the worker's thread calls ``Engine.step``; all else that changes something happens in the event
loop's thread. Pieces cross over in one batch a step, however many requests run.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from twell_numba.device.blas import single_threaded_blas
from twell_numba.errors import UsageError
from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings, Piece, Request
from twell_numba.infer.server.errors import ApiError, invalid
from twell_numba.infer.server.metrics import ServerMetrics

RETRY_AFTER_SECONDS = 1
MOST_FAILURES = 3  # of the engine in a row, after which the server ends

_log = logging.getLogger("twell_numba.infer.server")


class Inbox:
    """Pieces of the texts of one call that have come and are not yet taken.

    It never holds more than these texts: a reader that is slow finds them merged, not queued one by
    one, and the texts are bounded by the model's context.
    """

    def __init__(self, size: int) -> None:
        self._pieces: dict[int, list[Piece]] = {}
        self._arrived = asyncio.Event()
        self._unfinished = size

    def put(self, index: int, piece: Piece) -> None:
        """Add a piece of the text ``index``."""
        self._pieces.setdefault(index, []).append(piece)
        self._arrived.set()

    async def take(self) -> list[tuple[int, Piece]]:
        """Wait for pieces and return all, those of a text as one; empty after the last."""
        if not self._unfinished:
            return []
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pieces = self._pieces, {}
        merged = [(index, merge(pieces)) for index, pieces in taken.items()]
        self._unfinished -= sum(piece.finish_reason is not None for _, piece in merged)
        return merged


def merge(pieces: Sequence[Piece]) -> Piece:
    """Return consecutive pieces of a text as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        pieces[-1].finish_reason,
    )


class Job:
    """The requests of one call, and where their pieces arrive.

    Attributes
    ----------
    requests : list of Request
    inbox : Inbox
        Pieces by the request's place in the list.
    """

    def __init__(self, size: int) -> None:
        self.requests: list[Request] = []
        self.inbox = Inbox(size)


@dataclass(eq=False)
class _Live:
    """A request from its submission to its last piece, and when its pieces came."""

    job: Job
    index: int
    submitted: float
    first: float | None = None


class EngineWorker:
    """Runs an engine, and takes no more requests at once than it may.

    Parameters
    ----------
    engine : Engine
        Used by nothing else from now on.
    metrics : ServerMetrics
        Told of every request that ends.
    most_requests : int
        Running and waiting ones together; beyond them a call is refused.

    Attributes
    ----------
    failure : BaseException, optional
        What ended the engine, if it failed.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, most_requests: int) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._metrics = metrics
        self._most_requests = most_requests
        self._on_failure: Callable[[], None] = _do_nothing
        self._live: set[_Live] = set()
        self._outbox: deque[tuple[_Live, Piece, float]] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._failures = 0  # since the last token
        self._thread = threading.Thread(target=self._run, name="twell-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._is_closing

    def start(self, on_failure: Callable[[], None] | None = None) -> None:
        """Begin to work for the event loop that runs now.

        ``on_failure`` is called there if the engine itself fails, which ends the worker.
        """
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure or _do_nothing
        self._thread.start()

    def close(self) -> None:
        """Take no more requests, and cancel those there are."""
        self._is_closing = True
        for job in {live.job for live in self._live}:
            self.cancel(job)
        self._wake.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, after :meth:`close`: when its step is over."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def require_room(self, count: int) -> None:
        """Check that so many requests would be taken now; may be called from any thread.

        Raises
        ------
        ApiError
            429 if too many are here, 400 if so many can never be, 503 at the end.
        """
        if not self.is_alive:
            raise ApiError(503, "the server is ending")
        if count > self._most_requests:
            most = self._most_requests
            raise invalid(f"a call for {count} texts given, at most {most} wanted", "n")
        if len(self._live) + count > self._most_requests:
            raise ApiError(
                429,
                f"the queue of {self._most_requests} requests is full, try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )

    def submit(self, prompts: Sequence[tuple[np.ndarray, GenerationSettings]]) -> Job:
        """Take the requests of a call: all, or none of them.

        Raises
        ------
        ApiError
            As :meth:`require_room`, and 400 if one of these can never run.
        """
        self.require_room(len(prompts))
        job = Job(len(prompts))
        try:
            for index, (tokens, settings) in enumerate(prompts):
                self._submit_one(job, index, tokens, settings)
        except UsageError as error:
            self.cancel(job)
            raise invalid(str(error), code="context_length_exceeded") from None
        self._wake.set()
        return job

    def _submit_one(
        self, job: Job, index: int, tokens: np.ndarray, settings: GenerationSettings
    ) -> None:
        live = _Live(job, index, time.monotonic())
        job.requests.append(self.engine.submit(tokens, settings, partial(self._post, live)))
        self._live.add(live)

    def cancel(self, job: Job) -> None:
        """End those requests of a call that have not ended."""
        for request in job.requests:
            if not request.is_finished:
                self.engine.cancel(request)
        self._wake.set()

    def _run(self) -> None:
        try:
            # A step's many small products are done sooner than BLAS's own threads have met.
            with single_threaded_blas():
                self._work()
        except BaseException as error:
            # It does not recover: the server reports it and ends.
            self.failure = error
            self._call_in_loop(self._fail)

    def _work(self) -> None:
        is_busy = is_last = False
        while is_busy or not is_last:
            self._wake.clear()
            # Asked before the step: whatever was submitted before the end is in it.
            is_last = self._is_closing
            is_busy = self._step()
            if self._outbox:
                self._call_in_loop(self._deliver)
            if not is_busy and not is_last:
                self._wake.wait()

    def _step(self) -> bool:
        """Let the engine take a step. If it fails, its running requests do, and others go on."""
        tokens = self.engine.generated_tokens
        try:
            is_busy = self.engine.step()
        except Exception:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            _log.exception("a step of the engine failed, and with it the requests that ran")
            return True
        if self.engine.generated_tokens > tokens:
            self._failures = 0
        return is_busy

    def _post(self, live: _Live, piece: Piece) -> None:
        self._outbox.append((live, piece, time.monotonic()))

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            self._is_closing = True  # the loop is closed, and nobody waits for anything

    def _deliver(self) -> None:
        while self._outbox:
            live, piece, moment = self._outbox.popleft()
            if live.first is None and piece.tokens:
                live.first = moment
                self._metrics.time_to_first_token.observe(moment - live.submitted)
            if piece.finish_reason is not None:
                self._finish(live, piece.finish_reason, moment)
            live.job.inbox.put(live.index, piece)

    def _finish(self, live: _Live, reason: str, moment: float) -> None:
        self._live.discard(live)
        tokens = len(live.job.requests[live.index].tokens)
        self._metrics.finished.add(1, reason)
        if live.first is not None and tokens > 1:
            self._metrics.time_per_token.observe((moment - live.first) / (tokens - 1))

    def _fail(self) -> None:
        self._is_closing = True
        self._deliver()
        for live in list(self._live):
            live.job.requests[live.index].error = "the engine has failed"
            self._live.discard(live)
            live.job.inbox.put(live.index, Piece("", finish_reason="error"))
        self._on_failure()


def _do_nothing() -> None:
    pass
