"""Connections on which no request comes, or not all of it."""

import asyncio
from typing import Any

import pytest
import uvicorn

from twell_numba.infer.server import connection

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
BETWEEN_LOOKS = 0.2


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(10 * BETWEEN_LOOKS)
    headers = [(b"content-length", b"4")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"fine"})


async def exchange(*parts: bytes) -> bytes:
    """Send parts with an answer awaited after each head, and return what came until the end."""
    config = uvicorn.Config(
        app, loop="asyncio", http=connection.Connection, ws="none", lifespan="off", log_config=None
    )
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: connection.Connection(config, state, {}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        received = b""
        for part in parts:
            writer.write(part)
            while part.endswith(b"\r\n\r\n") and not received.endswith(b"fine"):
                received += await reader.read(1000)
        received += await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()
    assert not state.connections
    return received


@pytest.mark.parametrize(
    ("parts", "answers"),
    [
        ([], 0),
        ([b"G"], 0),
        ([HEAD[:-2]], 0),
        ([HEAD, b"GET"], 1),  # the byte keeps uvicorn from ending it
        ([HEAD.replace(b"/ ", b"/slow ", 1), b"G"], 1),
    ],
)
def test_a_connection_without_a_request_ends(
    parts: list[bytes], answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SECONDS_BETWEEN_LOOKS", BETWEEN_LOOKS)
    assert asyncio.run(exchange(*parts)).count(b"fine") == answers
