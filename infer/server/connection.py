"""HTTP/1.1 connections that end where no request comes, over uvicorn's."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

# How often a connection is looked at. One that is found waiting for the same request twice ends:
# whoever sends nothing, or half a head, would otherwise take a place for as long as they like.
SECONDS_BETWEEN_LOOKS = 10.0


class Connection(H11Protocol):
    """Ends connections that uvicorn leaves open: before a first request, and within a head.

    Uvicorn itself ends those on which nothing at all comes after an answer.
    """

    _next_look: asyncio.TimerHandle
    _waits_after: object = "not looked at"  # the request and answer before what is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._next_look = self.loop.call_later(SECONDS_BETWEEN_LOOKS, self._look)

    def _look(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._waits_after is self.cycle:
            self.transport.close()
            return
        self._waits_after = self.cycle if is_waiting else "in a request"
        self._look_later()
