"""`TextEncoder`: text to token ids and back, outside the event loop.

A call into the tokenizer cannot be stopped, and a long text takes seconds and hundreds of bytes of
memory per byte. So long texts go through a process of their own, one at a time: it is killed when
the client leaves, at the time limit, and after a text so large that its memory should return. Short
texts run in threads, and never wait for long ones.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Lock
from typing import Any

from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.engine_client import EngineDied

SHORT = 1 << 14
"""Characters of a short text, which takes some milliseconds; a token counts as four."""
LARGE = 1 << 18
"""Characters of a text whose memory returns with the end of the process."""
LIMIT_S = 30.0
"""Seconds that one text may take."""
NUM_THREADS = 2
ID_CHARACTERS = 4


class TextEncoder:
    """The tokenizer of a server. Its coroutines may be cancelled at any time."""

    def __init__(self, tokenizer: Tokenizer, limit_s: float = LIMIT_S) -> None:
        self.tokenizer = tokenizer
        self.threads = ThreadPoolExecutor(NUM_THREADS, "short texts")
        self.process = TokenizerProcess(tokenizer, limit_s)

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Return the ids of a text. Raises ValueError if it takes too long."""
        ids: list[int] = await self._call(len(text), "encode", text, special_tokens)
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens spelled out."""
        text: str = await self._call(ID_CHARACTERS * len(ids), "decode", ids, False)
        return text

    async def _call(self, size: int, method: str, *args: Any) -> Any:
        if size > SHORT:
            return await self.process.call(size, method, *args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, getattr(self.tokenizer, method), *args)

    def close(self) -> None:
        """End the process; the call that it runs fails."""
        self.process.close()


class TokenizerProcess:
    """A process that calls the tokenizer, and a thread that waits for it. It starts when it is
    first needed, and again after it was killed.
    """

    def __init__(self, tokenizer: Tokenizer, limit_s: float) -> None:
        self.tokenizer = tokenizer
        self.limit_s = limit_s
        self.thread = ThreadPoolExecutor(1, "long texts")
        self.lock = Lock()
        self.current: Event | None = None
        self.process: BaseProcess | None = None
        self.connection: Connection | None = None

    async def call(self, size: int, method: str, *args: Any) -> Any:
        """Return what the tokenizer's method returns, in turn; if cancelled, kill the process.

        `size` is in characters. Raises ValueError as the method does, and at the time limit.
        """
        has_left = Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self.thread, self._run, has_left, size, (method, *args)
            )
        finally:
            with self.lock:
                has_left.set()
                if self.current is has_left:
                    self._kill()

    def close(self) -> None:
        with self.lock:
            self._kill()

    def _run(self, has_left: Event, size: int, call: tuple[Any, ...]) -> Any:
        """Run one call, in the thread."""
        with self.lock:
            if has_left.is_set():
                return None
            is_new = self.process is None
            if is_new:
                self._start()
            self.current = has_left
            connection = self.connection
        assert connection is not None
        try:
            if is_new:
                connection.send(replace(self.tokenizer))  # without processes that it has started
            connection.send(call)
            if not connection.poll(self.limit_s):
                raise ValueError(f"the text takes more than {self.limit_s:g} s; shorten it")
            is_done, value = connection.recv()
        except (EOFError, OSError):
            size = LARGE
            raise EngineDied("the process that encodes long texts has ended; try again") from None
        except ValueError:
            size = LARGE
            raise
        finally:
            with self.lock:
                self.current = None
                if size >= LARGE:
                    self._kill()
        if not is_done:
            raise ValueError(value)
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, its_end = context.Pipe()
        self.process = context.Process(
            target=serve_calls, args=(its_end,), name="long texts", daemon=True
        )
        self.process.start()
        its_end.close()

    def _kill(self) -> None:
        """End the process; whoever waits for it meets the end of its connection."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def serve_calls(connection: Connection) -> None:
    """Receive a tokenizer, then call it for (method, *arguments), until the server is gone.

    Ctrl-C and a closed terminal are for the server, which may have requests to finish.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        tokenizer: Tokenizer = connection.recv()
        while True:
            method, *args = connection.recv()
            try:
                result = True, getattr(tokenizer, method)(*args)
            except ValueError as error:
                result = False, str(error)
            connection.send(result)
