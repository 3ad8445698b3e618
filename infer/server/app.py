"""The endpoints, over starlette."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from twell_numba.infer.request import Piece
from twell_numba.infer.server import metrics, responses
from twell_numba.infer.server.errors import ApiError
from twell_numba.infer.server.fields import parse_json_object
from twell_numba.infer.server.gate import CLIENT_GONE, Gate
from twell_numba.infer.server.responses import Answer
from twell_numba.infer.server.schemas import Call, parse_chat, parse_completion
from twell_numba.infer.server.service import EngineCalls, Service
from twell_numba.infer.server.worker import EngineWorker, Job, merge

T = TypeVar("T")
C = TypeVar("C", bound=Call)
Events = Callable[[list[bytes]], Awaitable[None]]

# How long a client that reads nothing more is waited for after its time is over.
_SECONDS_TO_READ_THE_END = 5.0


@dataclass(frozen=True)
class Limits:
    """What one request may take.

    Attributes
    ----------
    request_bytes : int
        Of its body.
    seconds : float
        From the first byte of the body to the end of the answer.
    """

    request_bytes: int
    seconds: float


def build_app(
    service: Service,
    worker: EngineWorker,
    limits: Limits,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
) -> ASGIApp:
    """Return the application.

    Parameters
    ----------
    service : Service
    worker : EngineWorker
        Started by the caller, in the event loop that runs the application.
    limits : Limits
    api_key : str, optional
        What clients must know.
    hosts : sequence of str, optional
        By what names the server may be called; None takes any.
    """
    endpoints = Endpoints(service, worker, limits)
    routes = [
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _on_api_error,
        HTTPException: _on_http_error,
        Exception: _on_fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    # A redirect would be built of the host that the client names.
    app.router.redirect_slashes = False
    return Gate(app, service.metrics.http_requests, api_key, hosts)


class Endpoints:
    """One method an endpoint."""

    def __init__(self, service: Service, worker: EngineWorker, limits: Limits) -> None:
        self._service = service
        self._worker = worker
        self._limits = limits

    async def completions(self, request: Request) -> Response:
        """Go on from prompts."""
        return await self._answer(request, parse_completion, self._service.prepare_completion)

    async def chat_completions(self, request: Request) -> Response:
        """Answer the last of some messages."""
        return await self._answer(request, parse_chat, self._service.prepare_chat)

    async def models(self, request: Request) -> Response:
        """List the model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Show the model, if the name is its own."""
        self._service.check_model(request.path_params["name"])
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken."""
        if not self._worker.is_alive:
            raise ApiError(503, "the server is ending")
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Return what has been counted, for Prometheus."""
        text = self._service.metrics.text()
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "twell_numba",
        }

    async def _answer(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], C],
        prepare: Callable[[C], tuple[EngineCalls, Answer]],
    ) -> Response:
        def prepared(content: dict[str, Any]) -> tuple[C, EngineCalls, Answer]:
            call = parse(content)
            self._service.check_model(call.model)
            # Refused before its prompts are prepared: a small body can ask for so many that they
            # take all memory, and a full queue is no time for long prompts.
            self._worker.require_room(call.text_count)
            return call, *prepare(call)

        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        try:
            async with asyncio.timeout_at(deadline):
                content = parse_json_object(await read_body(request, self._limits.request_bytes))
                # Long prompts take a while to become tokens; other clients are served meanwhile.
                call, engine_calls, answer = await run_in_threadpool(prepared, content)
                job = self._worker.submit(engine_calls)
                if call.stream:
                    return EventStream(self._worker, job, answer, call, self._limits, deadline)
                return await self._whole_answer(request, job, answer, call)
        except TimeoutError:
            raise _out_of_time(self._limits.seconds) from None
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)

    async def _whole_answer(
        self, request: Request, job: Job, answer: Answer, call: Call
    ) -> Response:
        try:
            pieces = await unless_disconnected(request.receive, collect(job))
            if pieces is None:
                return Response(status_code=CLIENT_GONE)
            check_ends(job, pieces)
            return _json(answer.whole(pieces, count_tokens(job, call.n)))
        finally:
            self._worker.cancel(job)


class EventStream(Response):
    """An answer as server-sent events, one a piece."""

    def __init__(
        self,
        worker: EngineWorker,
        job: Job,
        answer: Answer,
        call: Call,
        limits: Limits,
        deadline: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._worker = worker
        self._job = job
        self._answer = answer
        self._call = call
        self._limits = limits
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

        async def send_events(events: list[bytes], is_last: bool = False) -> None:
            body = b"".join(events)
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})

        async def send_all() -> None:
            await send(start)
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._send_pieces(send_events)
                events = self._last_events()
            except TimeoutError:
                events = [responses.event(_out_of_time(self._limits.seconds).content())]
            except ApiError as error:
                events = [responses.event(error.content())]
            await send_events([*events, responses.DONE], is_last=True)

        try:
            async with asyncio.timeout_at(self._deadline + _SECONDS_TO_READ_THE_END):
                await unless_disconnected(receive, send_all())
        except TimeoutError:
            pass  # the client reads nothing; the connection is closed
        finally:
            self._worker.cancel(self._job)

    async def _send_pieces(self, send: Events) -> None:
        await send([responses.event(self._with_usage(c)) for c in self._answer.first_chunks()])
        while pieces := await self._job.inbox.take():
            check_ends(self._job, [piece for _, piece in pieces])
            chunks = [self._answer.chunk(index, piece) for index, piece in pieces]
            await send([responses.event(self._with_usage(chunk)) for chunk in chunks])

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Where usage is wanted, every chunk has the field, null but in the last."""
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _last_events(self) -> list[bytes]:
        if not self._call.include_usage:
            return []
        return [responses.event(self._answer.last_chunk(count_tokens(self._job, self._call.n)))]


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Return the body of a request, reading no further than it may be long.

    Raises
    ------
    ApiError
        413 if it is longer; 415 if it is not said to be JSON.
    """
    # A web page can make a browser post other types to a server that only this machine reaches.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"content-type {media_type!r} given, application/json wanted")
    too_long = ApiError(413, f"a body of more than {most_bytes} bytes given, a shorter one wanted")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise too_long
    return bytes(body)


async def collect(job: Job) -> list[Piece]:
    """Wait for the end of all texts and return each as one piece."""
    parts: list[list[Piece]] = [[] for _ in job.requests]
    while pieces := await job.inbox.take():
        for index, piece in pieces:
            parts[index].append(piece)
    return [merge(part) for part in parts]


def check_ends(job: Job, pieces: Sequence[Piece]) -> None:
    """Raise ApiError if one of these pieces is the end of a text that could not be finished."""
    reasons = {piece.finish_reason for piece in pieces}
    if "error" in reasons:
        errors = [request.error for request in job.requests if request.error]
        raise ApiError(500, errors[0] if errors else "the engine has failed")
    if "cancelled" in reasons:
        raise ApiError(503, "the server is ending")


def count_tokens(job: Job, n: int) -> dict[str, int]:
    """Return the usage of a call with ``n`` texts a prompt; each prompt counts once."""
    prompt_tokens = sum(len(request.prompt_tokens) for request in job.requests[::n])
    return responses.usage(prompt_tokens, sum(len(request.tokens) for request in job.requests))


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await work and return its result; cancel it and return None once the client is gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _out_of_time(seconds: float) -> ApiError:
    return ApiError(408, f"the answer took longer than {seconds:g} seconds", code="timeout")


def _json(content: dict[str, Any], status: int = 200) -> Response:
    body = responses.to_bytes(content)
    return Response(body, status_code=status, media_type="application/json")


async def _on_api_error(request: Request, error: ApiError) -> Response:
    response = _json(error.content(), error.status)
    response.headers.update(error.headers)
    return response


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path}"
    message = {404: f"no {where} here", 405: f"{where} is not allowed"}
    headers = dict(error.headers or {})
    text = message.get(error.status_code, str(error.detail))
    return await _on_api_error(request, ApiError(error.status_code, text, headers=headers))


async def _on_fault(request: Request, error: Exception) -> Response:
    """Answer; the gate reports the fault."""
    return await _on_api_error(request, ApiError(500, "the server has a fault"))
