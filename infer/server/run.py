"""The server from its start to its end: its socket, its signals, and uvicorn around the app."""

import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from twell_numba.errors import UsageError
from twell_numba.infer.server.app import Limits, build_app
from twell_numba.infer.server.connection import Connection
from twell_numba.infer.server.service import Service
from twell_numba.infer.server.worker import EngineWorker
from twell_numba.infer.signals import HANG_UPS, handled_signals

# Connections beside those of requests: idle ones, and those that ask how it goes. Further ones are
# answered with status 503.
_OTHER_CONNECTIONS = 256
# How long answers that are being sent are waited for at the end, and then the engine's last step.
_SECONDS_TO_END = 3
_SECONDS_FOR_LAST_STEP = 10


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with this address, on which nothing listens yet.

    Parameters
    ----------
    host : str
        A name or an address, of IPv4 or IPv6.
    port : int
        0 takes a free one.

    Raises
    ------
    UsageError
        If the address is not this machine's, the port is in use, or may not be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _no_address(host, port, error) from error
    try:
        # The port of a server that has just ended is free, though its last connections linger.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise _no_address(host, port, error) from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Return the address under which a server on this socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    service: Service,
    bound: socket.socket,
    host: str,
    limits: Limits,
    queue: int,
    api_key: str | None,
    on_ready: Callable[[], None],
) -> None:
    """Answer requests until SIGINT, SIGTERM or SIGHUP, then end what runs and return.

    Parameters
    ----------
    service : Service
    bound : socket
        As :func:`bind` returns it.
    host : str
        The name that was bound. A server that only this machine reaches is called by no other.
    limits : Limits
    queue : int
        How many requests may wait beside those that run.
    api_key : str, optional
    on_ready : callable
        Called once requests are taken.

    Raises
    ------
    UsageError
        If something else listens there by now.
    BaseException
        Whatever ended the engine.
    """
    most_requests = service.engine.max_sequences + queue
    worker = EngineWorker(service.engine, service.metrics, most_requests)
    hosts = ["localhost", "127.0.0.1", "::1", host] if is_loopback(bound) else None
    app = build_app(service, worker, limits, api_key, hosts)
    # Faults are reported by the application; uvicorn's own lines would only repeat them.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=most_requests + _OTHER_CONNECTIONS,
        timeout_graceful_shutdown=_SECONDS_TO_END,
    )
    server = _Server(config, worker, on_ready)
    _listen(bound, host, config.backlog)
    try:
        server.run(sockets=[bound])
    finally:
        worker.close()
        worker.join(_SECONDS_FOR_LAST_STEP)
    if worker.failure is not None:
        raise worker.failure


def _listen(bound: socket.socket, host: str, backlog: int) -> None:
    port = bound.getsockname()[1]
    try:
        bound.listen(backlog)
    except OSError as error:
        raise _no_address(host, port, error) from error


class _Server(uvicorn.Server):
    """Starts the worker before requests come, and ends its requests before waiting for them."""

    def __init__(
        self, config: uvicorn.Config, worker: EngineWorker, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._worker.start(on_failure=self._end)
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._worker.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take also what a terminal sends that is closed; uvicorn takes SIGINT and SIGTERM."""
        with super().capture_signals(), handled_signals(HANG_UPS, self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, at a second signal at once. None is raised again: this end was asked for."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def _end(self) -> None:
        self.should_exit = True


def _no_address(host: str, port: int, error: Exception) -> UsageError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UsageError(
        f"--host {host} --port {port} given, but nothing can listen there ({reason}): another "
        f"address or port wanted, or --port 0 for a free one"
    )
