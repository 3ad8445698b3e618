"""Streams whose clients are slow, or gone, or take too long."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twell_numba.infer.request import GenerationSettings, Piece, Request
from twell_numba.infer.server import app
from twell_numba.infer.server.responses import CompletionAnswer
from twell_numba.infer.server.schemas import parse_completion
from twell_numba.infer.server.worker import Job
from twell_numba.models.tokenizer import ByteTokenizer


class Canceller:
    """A worker of which only the cancelling is wanted."""

    def __init__(self) -> None:
        self.cancelled: list[Job] = []

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job)


class Client:
    """The other end of a stream, which reads when it may and goes when it likes."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.is_gone = asyncio.Event()
        self.bodies: list[bytes] = []
        self.is_complete = False

    async def receive(self) -> dict[str, Any]:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.may_read.wait()
            self.bodies.append(message["body"])
            self.is_complete = not message["more_body"]

    @property
    def events(self) -> list[bytes]:
        return [line for line in b"".join(self.bodies).split(b"\n\n") if line]


class Stream:
    """A stream of one text, its client, and its worker."""

    def __init__(self, seconds: float = 20) -> None:
        self.job = Job(1)
        self.job.requests.append(Request(np.array([1]), GenerationSettings()))
        self.client = Client()
        self.worker = Canceller()
        call = parse_completion({"prompt": "x", "stream": True})
        deadline = asyncio.get_running_loop().time() + seconds
        self.response = app.EventStream(
            self.worker,  # type: ignore[arg-type]
            self.job,
            CompletionAnswer("m", ByteTokenizer(), False, [""]),
            call,
            app.Limits(1000, seconds),
            deadline,
        )
        self.task = asyncio.ensure_future(
            self.response({"type": "http"}, self.client.receive, self.client.send)  # type: ignore[arg-type]
        )


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def idle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_text_for_a_slow_reader_is_merged() -> None:
    async def scenario() -> None:
        stream = Stream()
        for number in range(1000):
            stream.job.inbox.put(0, Piece("a", (97,), (), "length" if number == 999 else None))
            if number % 100 == 0:
                await idle()
        assert stream.client.bodies == []
        stream.client.may_read.set()
        await stream.task
        assert stream.client.is_complete
        *pieces, done = stream.client.events
        assert done == b"data: [DONE]"
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in pieces]
        assert "".join(texts) == "a" * 1000
        assert len(texts) <= 3

    run(scenario)


def test_a_client_that_goes_ends_its_request_at_once() -> None:
    async def scenario() -> None:
        stream = Stream()
        stream.client.may_read.set()
        stream.job.inbox.put(0, Piece("a", (97,)))
        await idle()
        assert stream.client.events
        assert stream.worker.cancelled == []
        stream.client.is_gone.set()
        await stream.task
        assert stream.worker.cancelled == [stream.job]
        assert not stream.client.is_complete

    run(scenario)


def test_time_that_is_over_ends_the_stream_with_an_error() -> None:
    async def scenario() -> None:
        stream = Stream(seconds=0.2)
        stream.client.may_read.set()
        await stream.task
        error, done = stream.client.events
        assert json.loads(error[6:])["error"]["code"] == "timeout"
        assert done == b"data: [DONE]"
        assert stream.client.is_complete
        assert stream.worker.cancelled == [stream.job]

    run(scenario)


def test_a_client_that_never_reads_is_left_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_SECONDS_TO_READ_THE_END", 0.2)

    async def scenario() -> None:
        stream = Stream(seconds=0.2)
        stream.job.inbox.put(0, Piece("a", (97,)))
        started = time.monotonic()
        await stream.task
        assert time.monotonic() - started < 5
        assert stream.client.bodies == []
        assert stream.worker.cancelled == [stream.job]

    run(scenario)


def test_an_error_of_the_engine_is_an_event() -> None:
    async def scenario() -> None:
        stream = Stream()
        stream.client.may_read.set()
        stream.job.requests[0].error = "the weights have diverged"
        stream.job.inbox.put(0, Piece("", (), (), "error"))
        await stream.task
        error, _ = stream.client.events
        assert json.loads(error[6:])["error"]["message"] == "the weights have diverged"

    run(scenario)
