"""What every request passes first."""

import asyncio
from typing import Any

import pytest

from twell_numba.infer.server.gate import Gate
from twell_numba.infer.server.metrics import Counter


def ask(gate: Gate, path: str = "/v1/models", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a GET."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "headers": raw}
    asyncio.run(gate(scope, receive, send))
    start, *rest = sent
    got = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], got, b"".join(message["body"] for message in rest)


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError("of no interest to clients")


async def broken_halfway(scope: Any, receive: Any, send: Any) -> None:
    await fine(scope, receive, send)
    raise ZeroDivisionError


async def silent(scope: Any, receive: Any, send: Any) -> None:
    pass


def counter() -> Counter:
    return Counter("requests_total", "Requests.", ("endpoint", "status"))


@pytest.mark.parametrize(
    "authorization",
    ["", "secret", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2", "Basic secret",
     "Bearer sécret"],
)  # fmt: skip
def test_a_wrong_key_is_refused(authorization: str) -> None:
    gate = Gate(fine, counter(), api_key="secret")
    headers = {"authorization": authorization} if authorization else {}
    status, got, body = ask(gate, **headers)
    assert status == 401
    assert got["www-authenticate"] == "Bearer"
    assert b"invalid_api_key" in body
    assert b"secret" not in body
    # also where there is nothing: nobody learns which paths there are
    assert ask(gate, "/nothing", **headers)[0] == 401


def test_the_right_key_passes_and_health_needs_none() -> None:
    gate = Gate(fine, counter(), api_key="secret")
    for authorization in ("Bearer secret", "bearer  secret "):
        assert ask(gate, authorization=authorization)[0] == 200
    assert ask(gate, "/health")[0] == 200
    assert ask(gate, "/metrics")[0] == 401
    assert ask(Gate(fine, counter()))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::2]", 403),
    ],
)
def test_a_page_that_points_its_own_name_here_is_refused(host: str, status: int) -> None:
    gate = Gate(fine, counter(), hosts=["localhost", "127.0.0.1", "::1"])
    assert ask(gate, host=host)[0] == status
    assert ask(Gate(fine, counter()), host=host)[0] == 200


def test_requests_are_counted_by_endpoint_and_status(caplog: pytest.LogCaptureFixture) -> None:
    count = counter()
    for path in ("/v1/models", "/v1/models/a", "/v1/models/b/c", "/metrics", "/x", "/y"):
        ask(Gate(fine, count), path)
    ask(Gate(broken, count))
    with pytest.raises(ValueError, match="not enough values"):
        ask(Gate(silent, count))  # the client was gone
    assert sorted(list(count.lines())[2:]) == [
        'requests_total{endpoint="/metrics",status="200"} 1',
        'requests_total{endpoint="/v1/models",status="200"} 3',
        'requests_total{endpoint="/v1/models",status="499"} 1',
        'requests_total{endpoint="/v1/models",status="500"} 1',
        'requests_total{endpoint="other",status="200"} 2',
    ]


def test_a_path_cannot_write_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask(Gate(broken, counter()), "/x\nINFO all is well")
    assert "INFO all is well" in caplog.text
    assert "\nINFO" not in caplog.text


def test_a_fault_is_told_to_the_operator_and_not_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status, _, body = ask(Gate(broken, counter()))
    assert (status, b"of no interest" in body) == (500, False)
    assert "of no interest" in caplog.text
    assert ask(Gate(broken_halfway, counter()))[0] == 200
