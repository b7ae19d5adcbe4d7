"""The life of the server: it binds, starts the engine, serves, drains on a signal, and ends within
a known time."""

import asyncio
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Protocol, cast

import uvicorn
from fastapi import FastAPI

from shardwise.serve.api.connections import ConnectionLimits, LimitedProtocol
from shardwise.serve.api.log import configure
from shardwise.serve.api.middleware import Admission
from shardwise.serve.api.server import make_app
from shardwise.serve.engine_client import EngineClient, EngineDied
from shardwise.serve.settings import ServerSettings

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than clients keep it, so that they close it
first."""
DRAIN_S = 15.0
"""Seconds that running requests have to finish."""
ABORT_S = 1.0
"""Seconds for the error to reach clients whose requests are cut off."""
END_S = 5.0
"""Seconds after the drain, or after a second signal, in which the process ends: ABORT_S, open
connections, the engine."""
OTHER_FILES = 256
"""Open files besides connections."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Bind an address before a model is loaded, so that a port in use fails at once.

    Nobody can connect yet. Raises ValueError if the address cannot be bound.
    """
    try:
        if not 0 <= port < 2**16:
            raise OSError(f"ports are from 0 to {2**16 - 1}")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}, port {port}: {reason}; --port 0 picks a free port"
        ) from None
    return listener


class StartableEngine(EngineClient, Protocol):
    """An engine that has to be started."""

    async def start(self) -> None: ...


def serve_forever(
    engine: StartableEngine,
    settings: ServerSettings,
    listener: socket.socket,
    drain_s: float = DRAIN_S,
) -> int:
    """Start the engine and serve until SIGTERM or SIGINT, then let running requests finish.

    Returns how many requests were cut off after `drain_s`. Raises what the engine's start raises,
    and EngineDied once the engine has ended for good. Some seconds after the drain the process
    ends, even if a thread still works.
    """
    configure(settings.log_level, access=not settings.no_access_log)
    raise_open_files(settings.max_connections + OTHER_FILES)

    async def serve() -> int:
        await engine.start()
        limits = ConnectionLimits(settings.max_connections, settings.header_timeout_s)
        server = Server(make_app(engine, settings), limits, drain_s, end_process_after)
        watch = asyncio.ensure_future(server.stop_if_lost())
        await server.serve(sockets=[listener])
        watch.cancel()
        if engine.lost.is_set():
            raise EngineDied("the engine has ended for good")
        return server.num_cut_off

    return asyncio.run(serve())


def raise_open_files(number: int) -> None:
    """Allow this process so many open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def end_process_after(seconds: float) -> None:
    """End this process with exit code 1 in `seconds`, whatever its threads do, and its children."""

    def end() -> None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class Server(uvicorn.Server):
    """A uvicorn server that prints when it is ready, and that drains on a signal: it refuses new
    requests with 503 until the running ones have finished.

    (uvicorn closes the socket first, and clients of a load balancer see refused connections.)
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits,
        drain_s: float = DRAIN_S,
        end_after: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
                log_config=None,
                access_log=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        self.admission: Admission = app.state.admission
        self.engine: EngineClient = app.state.engine
        self.drain_s = drain_s
        self.end_after = end_after
        self.draining: asyncio.Task[None] | None = None
        self.num_cut_off = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            print_log(f"ready at http://{address}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            # at once, and not in the event loop, which may be busy
            self.end_after(END_S if self.draining else self.drain_s + END_S)
            loop.call_soon_threadsafe(self.stop)

        former = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Drain; at the second call, stop draining and cut off what runs."""
        if self.draining is None:
            self.draining = asyncio.ensure_future(self.drain())
        else:
            self.draining.cancel()

    async def stop_if_lost(self) -> None:
        """Stop once the engine has ended for good."""
        await self.engine.lost.wait()
        self.should_exit = True

    async def drain(self) -> None:
        if self.admission.num_in_flight:
            print_log(
                f"shutting down; {self.admission.num_in_flight} running requests have "
                f"{self.drain_s:g} s to finish"
            )
        try:
            await self.admission.drain(self.drain_s)
        finally:
            self.num_cut_off = self.admission.num_in_flight
            if self.num_cut_off:  # closing the engine ends their requests with an error
                await self.engine.close()
                await self.admission.drain(ABORT_S)
            self.should_exit = True


def print_log(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)
