"""What every HTTP request passes first: its name for the server, its key, and the counting."""

import hmac
import logging
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twell_numba.infer.server import responses
from twell_numba.infer.server.errors import ApiError
from twell_numba.infer.server.metrics import Counter

# Of a client that went before it was answered, as nginx writes it; nobody gets it.
CLIENT_GONE = 499

_PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
}
_log = logging.getLogger("twell_numba.infer.server")


class Gate:
    """Checks and counts the requests of an application, and reports its faults.

    Parameters
    ----------
    app : ASGI application
    counter : Counter
        Of labels endpoint and status.
    api_key : str, optional
        Asked for everywhere but at ``/health``.
    hosts : sequence of str, optional
        By what names the server may be called. A web page of another name could otherwise point
        that name to this machine and talk to the server through a browser.
    """

    def __init__(
        self,
        app: ASGIApp,
        counter: Counter,
        api_key: str | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._app = app
        self._counter = counter
        self._api_key = None if api_key is None else api_key.encode()
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} given, http wanted")
        status = CLIENT_GONE

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, counting_send)
        except ApiError as error:
            await _send_error(error, counting_send)
        except Exception:
            # A fault of this program. The client is told no more than that.
            # A path may hold line breaks.
            _log.exception("%s %r failed", scope["method"], scope["path"])
            if status == CLIENT_GONE:
                await _send_error(ApiError(500, "the server has a fault"), counting_send)
        finally:
            self._counter.add(1, _endpoint(scope["path"]), str(status))

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and host and host not in self._hosts:
            raise ApiError(403, f"host {host!r} given, the server's own address wanted")
        if self._api_key is None or scope["path"] == "/health":
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise ApiError(
                401,
                "a wrong API key or none given; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0][1:].lower()
    return host.partition(":")[0].lower()


def _endpoint(path: str) -> str:
    """Return the endpoint's label: as many as there are endpoints, whatever clients ask for."""
    if path.startswith("/v1/models/"):
        return "/v1/models"
    return path if path in _PATHS else "other"


async def _send_error(error: ApiError, send: Send) -> None:
    body = responses.to_bytes(error.content())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.lower(): value for name, value in error.headers.items()},
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
