"""A server's start and its end."""

import http.client
import json
import signal
import socket
import time
from typing import Any

import pytest

from twell_numba.errors import UsageError
from twell_numba.infer.server import run


def test_an_address_is_written_as_a_client_needs_it() -> None:
    with run.bind("127.0.0.1", 0) as bound:
        assert run.url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert run.is_loopback(bound)
    with run.bind("0.0.0.0", 0) as bound:
        assert not run.is_loopback(bound)


def test_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    with run.bind("::1", 0) as bound:
        assert run.url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"
        assert run.is_loopback(bound)


def test_a_port_taken_between_binding_and_listening_is_refused() -> None:
    with run.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with run.bind("127.0.0.1", port) as second:  # nothing listens yet
            first.listen()
            with pytest.raises(UsageError, match=f"--port {port} given"):
                run._listen(second, "127.0.0.1", 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_running_streams_and_the_server(start: Any, number: int) -> None:
    server = start("--cache-tokens", 40_000)
    connections = []
    for _ in range(2):
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        body = {"prompt": "x", "max_tokens": 15_000, "temperature": 0, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        connections.append(connection)
    responses = [connection.getresponse() for connection in connections]
    for response in responses:
        assert response.readline().startswith(b"data: ")
    # An idle connection and one in the middle of a request hold up nothing either.
    idle = socket.create_connection(server.address, timeout=20)
    idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")

    started = time.monotonic()
    assert server.stop(number) == 0
    assert time.monotonic() - started < 8
    for response in responses:
        *_, error, done, _ = response.read().decode().split("\n\n")
        assert (
            "the server is ending" in json.loads(error.removeprefix("data: "))["error"]["message"]
        )
        assert done == "data: [DONE]"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address, timeout=5)
    assert "Traceback" not in server.stderr.read_text()
    for connection in connections:
        connection.close()
    idle.close()


def test_the_same_port_serves_again_at_once(start: Any) -> None:
    first = start()
    assert first.request("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
    assert first.stop() == 0
    second = start("--port", first.address[1])
    assert second.address == first.address
    assert second.request("/health").status == 200
    assert second.stop(signal.SIGINT) == 0


def test_a_hang_up_is_ignored_where_it_was_before(start: Any) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which processes inherit, as of nohup
    try:
        server = start()
    finally:
        signal.signal(signal.SIGHUP, previous)
    server.process.send_signal(signal.SIGHUP)
    time.sleep(1)  # a server that ends has ended by then
    assert server.process.poll() is None
    assert server.request("/health").status == 200
    assert server.stop() == 0
