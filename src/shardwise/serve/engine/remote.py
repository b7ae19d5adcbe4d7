"""The server's end of the engine, which lives in a process of its own: requests go in and deltas
come out, asynchronously.

So a step of the model never waits for a client, and no client for a step. One thread receives the
engine's messages and passes them to the event loop; another sends messages, which the engine
handles between steps. If the engine dies, all pending requests fail with the reason, and it is
restarted: at once, or after a growing pause if it ends early again and again.
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
from dataclasses import replace
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.engine.scheduler import QueueFull
from shardwise.serve.engine_client import EngineDied, Ready, Stats
from shardwise.serve.request import Delta, Request
from shardwise.serve.settings import EngineSettings

END_S = 10.0
"""Seconds that an engine which failed has to end before it is killed: its ranks find out whose
fault it was."""
CLOSE_S = 2.0
"""Seconds that an engine has to end when the server closes it."""
QUICK_S = 60.0
"""An engine that ends sooner than this after its start has ended early."""
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a restart, by the number of early ends and failed starts in a row before it. One
more, and the engine is lost."""

Message = tuple[Any, ...]
"""A message: (kind, request id, arguments) to the engine, (kind, values) from it."""


class RemoteEngine:
    """The engine client of the server. All its coroutines belong to one event loop.

    `report` gets a line about each phase of the start, and if the engine ends. `waiting` has the
    queue of each pending request, by its id. `lost` is set once the engine has ended for good.
    """

    def __init__(
        self,
        settings: EngineSettings,
        config: ModelConfig,
        tokenizer: Tokenizer,
        report: Callable[[str], None],
        pauses_s: Sequence[float] = PAUSES_S,
    ):
        self.settings = settings
        self.config = config
        self.tokenizer = tokenizer
        self.report = report
        self.vocab_size = config.vocab_size
        self.max_len = settings.max_len or config.max_positions
        self.request_ids = count()
        self.waiting: dict[int, asyncio.Queue[Any]] = {}
        self.process: EngineProcess | None = None
        self.running = False
        self.closing = False
        self.pauses_s = pauses_s
        self.num_early = 0
        self.lost = asyncio.Event()
        self.restart: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.is_running and not self.closing

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.running

    # -- start and end

    async def start(self) -> None:
        """Start the engine and return when it is ready.

        Raises ValueError for a model or settings that cannot be served, EngineDied for the rest.
        """
        loop = asyncio.get_running_loop()
        self.process = process = EngineProcess(self.settings)
        ready: asyncio.Future[Ready] = loop.create_future()

        def receive(message: Message) -> None:
            loop.call_soon_threadsafe(self.handle, process, ready, message)

        process.listen(receive)
        started = await ready
        self.report(str(started))

    async def start_again(self) -> None:
        """Restart the engine, with a pause before each attempt."""
        while self.num_early < len(self.pauses_s):
            pause_s = self.pauses_s[self.num_early]
            self.report(f"it is started again{f' in {pause_s:g} s' if pause_s else ''}")
            await asyncio.sleep(pause_s)
            if self.closing:
                return
            try:
                return await self.start()
            except (ValueError, EngineDied) as error:
                self.num_early += 1
                if not self.closing:
                    self.report(f"it could not be started: {error}")
        self.report(f"it ended early {self.num_early} times in a row, and is not started again")
        self.lost.set()

    async def close(self) -> None:
        """End the engine; pending requests fail."""
        self.closing = True
        for request_id in self.waiting:
            self.deliver(request_id, EngineDied("the server is shutting down"))
        if self.process is not None:
            await asyncio.to_thread(self.process.end, CLOSE_S)

    # -- messages of the engine

    def handle(
        self, process: "EngineProcess", ready: "asyncio.Future[Ready]", message: Message
    ) -> None:
        """Handle a message of the engine, in the event loop."""
        kind, *values = message
        if kind == "deltas":
            for delta in values[0]:
                self.deliver(delta.request_id, delta)
        elif kind == "phase":
            self.report("{}: {:.2f} s".format(*values))
        elif kind == "ready":
            self.max_len = values[0].max_len
            self.running = True
            ready.set_result(values[0])
        elif kind == "dead":
            self.handle_death(process, ready, *values)
        else:
            request_id, value = values
            errors = {
                "full": lambda: QueueFull(*value),
                "refused": lambda: ValueError(value),
                "failed": lambda: RuntimeError(value),
            }
            self.deliver(request_id, errors[kind]() if kind in errors else value)

    def deliver(self, request_id: int, value: Any) -> None:
        """Queue a delta, result or error for a request, unless its client has left."""
        if request_id in self.waiting:
            self.waiting[request_id].put_nowait(value)

    def handle_death(
        self, process: "EngineProcess", ready: "asyncio.Future[Ready]", kind: str, reason: str
    ) -> None:
        """Fail all pending requests and restart the engine, unless it never became ready."""
        self.process = None
        self.running = False
        if not ready.done():
            is_refusal = kind == "ValueError"
            ready.set_exception(ValueError(reason) if is_refusal else EngineDied(reason))
            return
        if self.closing:
            return
        for request_id in self.waiting:
            self.deliver(request_id, EngineDied(f"the engine has ended: {in_brief(reason)}"))
        self.report(f"the engine has ended: {reason}")
        is_early = time.monotonic() - process.start_s < QUICK_S
        self.num_early = self.num_early + 1 if is_early else 0
        self.restart = asyncio.create_task(self.start_again())

    # -- messages to the engine

    def send(self, *message: Any) -> None:
        """Queue a message to the engine. Raises EngineDied if it is not running."""
        if self.closing:
            raise EngineDied("the server is shutting down")
        if self.process is None or not self.running:
            what = "has ended for good" if self.lost.is_set() else "is started again"
            raise EngineDied(f"the engine is not running; it {what}")
        self.process.outgoing.put(message)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all n completions as they come; closing the generator aborts the
        request.

        Assigns the request its id. Raises ValueError for a request that can never be served,
        QueueFull, EngineDied.
        """
        request_id = next(self.request_ids)
        queue = self.waiting[request_id] = asyncio.Queue()
        num_running = request.params.n
        try:
            self.send("add", request_id, replace(request, request_id=request_id))
            while num_running:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    num_running = 0
                    raise delta
                num_running -= delta.finish_reason is not None
                yield delta
        finally:
            del self.waiting[request_id]
            if num_running:
                with suppress(EngineDied):
                    self.send("abort", request_id)

    async def embed(self, tokens: Sequence[int]) -> list[float]:
        """Return the mean of the last hidden states, scaled to length 1. Raises as `generate`
        does.
        """
        vector: list[float] = await self.call("embed", list(tokens))
        return vector

    async def stats(self) -> Stats:
        stats: Stats = await self.call("stats")
        return stats

    async def call(self, kind: str, *arguments: Any) -> Any:
        """Send a message and return the engine's result; abort it if the caller is cancelled."""
        request_id = next(self.request_ids)
        queue = self.waiting[request_id] = asyncio.Queue()
        result = None
        try:
            self.send(kind, request_id, *arguments)
            result = await queue.get()
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            del self.waiting[request_id]
            if result is None:
                with suppress(EngineDied):
                    self.send("abort", request_id)


def in_brief(reason: str) -> str:
    """Return which ranks failed, for clients; the traceback before it is for the log."""
    return "; ".join(line for line in reason.splitlines() if line.startswith("rank ")) or reason


class EngineProcess:
    """A process, a socket in a folder that only this user may enter, and two threads: one receives
    messages, one sends what is put into `outgoing`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.start_s = time.monotonic()
        self.end_s = END_S
        self.folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        address = os.path.join(self.folder.name, "engine")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(address)
        self.socket.listen(1)
        self.socket.settimeout(0.1)
        context = multiprocessing.get_context("spawn")
        self.failure, failing = context.Pipe(duplex=False)
        self.process = context.Process(
            target=run_engine, args=(settings, address, failing), name="engine"
        )
        with signals_blocked():
            self.process.start()
        failing.close()
        self.connection: Connection | None = None
        self.outgoing: SimpleQueue[Message | None] = SimpleQueue()
        # or Python would wait for the process, and the process for the server
        atexit.register(self.end)

    def listen(self, receive: Callable[[Message], None]) -> None:
        """Pass every message to `receive`, from a thread; the last is ("dead", kind, reason)."""

        def run() -> None:
            with suppress(EOFError, OSError, RuntimeError):  # the last: the loop is closed
                self.connection = self.accept()
                sender = threading.Thread(
                    target=self.send_all, name="messages to the engine", daemon=True
                )
                sender.start()
                while self.connection is not None:
                    receive(self.connection.recv())
            reason = self.reason()
            with suppress(RuntimeError):
                receive(("dead", *reason))

        self.thread = threading.Thread(target=run, name="messages of the engine", daemon=True)
        self.thread.start()

    def accept(self) -> Connection | None:
        """Return the engine's connection, or None if it ended before it connected."""
        while self.process.is_alive():
            with suppress(TimeoutError):
                accepted, _ = self.socket.accept()
                return Connection(accepted.detach())
        return None

    def reason(self) -> tuple[str, str]:
        """Wait for the process to end, clean up, and return (exception name, reason)."""
        self.hang_up()
        self.outgoing.put(None)
        self.process.join(self.end_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.socket.close()
        self.folder.cleanup()
        atexit.unregister(self.end)
        with suppress(EOFError, OSError):
            if self.failure.poll():
                kind, reason = self.failure.recv()
                return kind, reason
        return "EngineDied", f"its process ended with code {self.process.exitcode}"

    def send_all(self) -> None:
        with suppress(OSError):  # the engine is gone, as the other thread notices too
            while (message := self.outgoing.get()) is not None and self.connection is not None:
                self.connection.send(message)

    def end(self, within_s: float = END_S) -> None:
        """End the process and wait for it; one that has not yet connected is killed."""
        self.end_s = within_s
        if self.connection is None:
            self.process.kill()
        self.hang_up()
        self.thread.join()

    def hang_up(self) -> None:
        """Close the connection, which ends the engine."""
        if self.connection is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block stop signals. A process that is started in the block inherits this, until it ignores
    them.
    """
    resource_tracker.ensure_running()  # now, since starting it unblocks signals
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def run_engine(settings: EngineSettings, address: str, failure: Connection) -> None:
    """Run the engine's process, which imports the model and torch; the server does not."""
    from shardwise.serve.engine.worker import main

    main(settings, address, failure)
