"""Limits of connections, which uvicorn does not have: a time for the head of a request, and a
number.

A connection waits if it has sent no complete head of a request: after its start, or after a
response. The body has its own time (`middleware.py`), and an idle connection too (KEEP_ALIVE_S).
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shardwise.serve.api.errors import RETRY_LATER, ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    HttpProtocol = AutoHTTPProtocol  # httptools, where it is installed


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections.

    Attributes:
        max_connections: Connections at once. One more takes the place of the connection that has
            waited longest, and is refused if none waits.
        header_s: Seconds for the head of a request, from the first byte, or from the connection.
    """

    max_connections: int
    header_s: float


class LimitedProtocol(HttpProtocol):
    """uvicorn's protocol of one connection, with limits."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits
        self.head_timer: asyncio.TimerHandle | None = None
        self.last_s = self.loop.time()

    @property
    def is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.time_head()
        if len(self.connections) > self.limits.max_connections:
            self.make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.last_s = self.loop.time()
        if self.is_waiting:
            self.time_head()
        else:
            self.stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def time_head(self) -> None:
        """Start the time for a head, unless it runs."""
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(self.limits.header_s, self.transport.abort)

    def stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def make_room(self) -> None:
        """Close the connection that has waited longest; refuse this one if there is none."""
        others = (each for each in self.connections if each is not self)
        waiting = [each for each in others if isinstance(each, LimitedProtocol) and each.is_waiting]
        if waiting:
            longest = min(waiting, key=lambda each: each.last_s)
            self.connections.discard(longest)
            longest.transport.abort()
            return
        error = ApiError(503, "the server has too many connections", "too_many_connections")
        body = bytes(error.response().body)
        head = {"content-type": "application/json", "content-length": len(body), **RETRY_LATER}
        lines = [f"{name}: {value}" for name, value in (head | {"connection": "close"}).items()]
        text = "\r\n".join(["HTTP/1.1 503 Service Unavailable", *lines, "", ""])
        self.transport.write(text.encode() + body)
        self.transport.close()
