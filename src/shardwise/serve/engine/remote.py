"""The server's end of the engine, which lives in a process of its own: requests go in, pieces come
out, asynchronously.

So a step of the model never waits for a client, and no client for a step. One thread takes what the
engine says and gives it to the event loop, another gives it what it is told, which it takes between
steps. If the engine dies, all who wait are told why, and another is started.
"""

import asyncio
import atexit
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.engine.scheduler import QueueFull
from shardwise.serve.engine_client import EngineDied, Stats
from shardwise.serve.request import Ask, Piece
from shardwise.serve.settings import EngineSettings

END_S = 10.0
"""How long an engine that should end is waited for before it is ended."""
QUICK_S = 60.0
"""An engine that lives no longer than this is not started again."""


class RemoteEngine:
    """Given to the server by `start`. All its coroutines belong to one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        config: ModelConfig,
        tokenizer: Tokenizer,
        say: Callable[[str], None],
    ):
        self.settings = settings
        self.config = config
        self.tokenizer = tokenizer
        self.say = say
        self.vocab_size = config.vocab_size
        self.max_len = settings.max_len or config.max_positions
        self.names = count()
        self.waiting: dict[int, asyncio.Queue[Any]] = {}
        """By name, those who wait for pieces or an answer."""
        self.process: EngineProcess | None = None
        self.running = self.closing = self.is_lost = False
        self.restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the engine is ready. Raises ValueError for what cannot be served, EngineDied
        for the rest."""
        loop = asyncio.get_running_loop()
        self.process = process = EngineProcess(self.settings)
        ready: asyncio.Future[Any] = loop.create_future()

        def take(message: tuple[Any, ...]) -> None:
            self.take(process, ready, message)

        def hear(message: tuple[Any, ...]) -> None:
            loop.call_soon_threadsafe(take, message)

        process.listen(hear)
        told = await ready
        pages = told.num_pages
        tokens = told.num_pages * told.page_tokens
        self.say(
            f"{pages:,} pages of {told.page_tokens} tokens: {tokens:,} in all, {self.max_len:,} in a request at most"
        )

    def take(
        self, process: "EngineProcess", ready: "asyncio.Future[Any]", message: tuple[Any, ...]
    ) -> None:
        """What the engine says, in the event loop."""
        what, *rest = message
        if what == "pieces":
            for name, piece in rest[0]:
                self.give(name, piece)
        elif what == "phase":
            self.say("{}: {:.2f} s".format(*rest))
        elif what == "ready":
            self.max_len = rest[0].max_len
            self.running = True
            ready.set_result(rest[0])
        elif what == "dead":
            self.bury(process, ready, *rest)
        else:
            name, given = rest
            errors = {
                "full": lambda: QueueFull(*given),
                "refused": lambda: ValueError(given),
                "failed": lambda: RuntimeError(given),
            }
            self.give(name, errors[what]() if what in errors else given)

    def give(self, name: int, what: Any) -> None:
        if name in self.waiting:  # else who asked has left
            self.waiting[name].put_nowait(what)

    def bury(
        self, process: "EngineProcess", ready: "asyncio.Future[Any]", kind: str, reason: str
    ) -> None:
        """Tell all who wait, and start another engine, unless this one never started or ended at
        once."""
        error = ValueError(reason) if kind == "ValueError" else EngineDied(reason)
        self.process = None
        self.running = False
        if not ready.done():
            ready.set_exception(error)
            return
        if self.closing:
            return
        for name in self.waiting:
            self.give(name, EngineDied(f"the engine has ended: {in_brief(reason)}"))
        self.say(f"the engine has ended: {reason}")
        if time.monotonic() - process.began_s > QUICK_S:
            self.say("it is started again")
            self.restart = asyncio.create_task(self.start_again())
        else:
            self.is_lost = True
            self.say("it ended soon after it had begun, so it is not started again")

    async def start_again(self) -> None:
        try:
            await self.start()
        except (ValueError, EngineDied) as error:
            self.is_lost = True
            if not self.closing:
                self.say(f"it could not be started: {error}")

    @property
    def is_ready(self) -> bool:
        return self.running and not self.closing

    def tell(self, *message: Any) -> None:
        if self.closing:
            raise EngineDied("the server is shutting down")
        if self.process is None or not self.running:
            raise EngineDied(
                f"the engine is not running; it {'has ended for good' if self.is_lost else 'is started again'}"
            )
        self.process.outgoing.put(message)

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """The pieces of all n answers as they come. Who leaves early aborts the rest. Raises
        ValueError for a request that can never be served, QueueFull, EngineDied."""
        name = next(self.names)
        queue = self.waiting[name] = asyncio.Queue()
        left = ask.params.n
        try:
            self.tell("add", name, ask)
            while left:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    left = 0
                    raise piece
                left -= piece.finish_reason is not None
                yield piece
        finally:
            del self.waiting[name]
            if left:
                with suppress(EngineDied):
                    self.tell("abort", name)

    async def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean of the last hidden states of `tokens`, of length 1. Raises as `generate`
        does."""
        found: list[float] = await self.ask("embed", list(tokens))
        return found

    async def stats(self) -> Stats:
        found: Stats = await self.ask("stats")
        return found

    async def ask(self, what: str, *given: Any) -> Any:
        name = next(self.names)
        queue = self.waiting[name] = asyncio.Queue()
        answer = None
        try:
            self.tell(what, name, *given)
            answer = await queue.get()
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            del self.waiting[name]
            if answer is None:
                with suppress(EngineDied):
                    self.tell("abort", name)

    async def close(self) -> None:
        """End the engine; whoever still waits is told so."""
        self.closing = True
        for name in self.waiting:
            self.give(name, EngineDied("the server is shutting down"))
        if self.process is not None:
            await asyncio.to_thread(self.process.end)


def in_brief(reason: str) -> str:
    """Which ranks failed, for clients; the traceback before it is for the log."""
    return "; ".join(line for line in reason.splitlines() if line.startswith("rank ")) or reason


class EngineProcess:
    """A process, a socket in a folder that only this user may enter, and two threads: one listens,
    one sends what is put into `outgoing`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.began_s = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        address = os.path.join(self.folder.name, "engine")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address)
        self.socket.listen(1)
        self.socket.settimeout(0.1)
        context = multiprocessing.get_context("spawn")
        self.failure, failing = context.Pipe(duplex=False)
        self.process = context.Process(
            target=enter, args=(settings, address, failing), name="engine"
        )
        with signals_held_back():
            self.process.start()
        failing.close()
        self.connection: Connection | None = None
        self.outgoing: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        atexit.register(
            self.end
        )  # or Python would wait for the process, and the process for the server

    def listen(self, take: Callable[[tuple[Any, ...]], None]) -> None:
        """Give every message to `take`, from a thread; the last is ("dead", kind, reason)."""

        def run() -> None:
            with suppress(EOFError, OSError, RuntimeError):  # the last: the loop is closed
                self.connection = self.accept()
                threading.Thread(
                    target=self.send, name="messages to the engine", daemon=True
                ).start()
                while self.connection is not None:
                    take(self.connection.recv())
            reason = self.reason()
            with suppress(RuntimeError):
                take(("dead", *reason))

        self.thread = threading.Thread(target=run, name="messages of the engine", daemon=True)
        self.thread.start()

    def accept(self) -> Connection | None:
        """The engine's connection; None if it has ended before it made one."""
        while self.process.is_alive():
            with suppress(TimeoutError):
                accepted, _ = self.socket.accept()
                return Connection(accepted.detach())
        return None

    def reason(self) -> tuple[str, str]:
        """Why the process has ended, or ends now that it cannot be heard any more. Nothing of it is
        left."""
        self.hang_up()
        self.outgoing.put(None)
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.socket.close()
        self.folder.cleanup()
        atexit.unregister(self.end)
        with suppress(EOFError, OSError):
            if self.failure.poll():
                kind, told = self.failure.recv()
                return kind, told
        return "EngineDied", f"its process ended with code {self.process.exitcode}"

    def send(self) -> None:
        with suppress(OSError):  # the engine is gone, as the other thread hears too
            while (message := self.outgoing.get()) is not None and self.connection is not None:
                self.connection.send(message)

    def end(self) -> None:
        """End the process and return once it has gone; one that has not yet connected is killed."""
        if self.connection is None:
            self.process.kill()
        self.hang_up()
        self.thread.join()

    def hang_up(self) -> None:
        """Close the connection, which the engine takes as the end."""
        if self.connection is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process that is started in the block holds them back as well, until it has said that it
    ignores them."""
    resource_tracker.ensure_running()  # now, since starting it lets signals through
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def enter(settings: EngineSettings, address: str, failure: Connection) -> None:
    """Where the engine's process begins. The model and torch are imported there, not in the
    server."""
    from shardwise.serve.engine.worker import main

    main(settings, address, failure)
