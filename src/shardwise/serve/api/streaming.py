"""Long responses: work that ends when its client disconnects, several streams merged into one, and
server-sent events.

Every task that a function here starts has ended when the function returns, raises or is cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""JSON's spelling of characters that some clients take for the end of a line."""
COMMENT = ": waiting\n\n"
COMMENT_S = 15.0
"""Seconds without an event after which a stream sends a comment; proxies close connections that are
idle for 60 s."""


class ClientDisconnected(Exception):
    """The client has closed its connection; nobody reads a response."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first.

    `receive` is that of a request whose body has been read: only a disconnect can follow. Raises
    ClientDisconnected.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        return worker.result()
    finally:
        await cancel_and_wait((worker, watcher))


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that still run, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the source, item) as items arrive; the first error ends all sources.

    At most one item per source is read ahead, so that a slow reader slows its sources down and
    fills no memory.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))
    tasks = [
        asyncio.create_task(enqueue(index, source, ready)) for index, source in enumerate(sources)
    ]
    try:
        num_open = len(sources)
        while num_open:
            entry = await ready.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry
    finally:
        await cancel_and_wait(tasks)


async def enqueue(
    index: int,
    source: AsyncGenerator[T, None],
    ready: asyncio.Queue[tuple[int, T] | Exception | None],
) -> None:
    """Put (index, item) of a source on the queue, and at its end None or the error."""
    try:
        async with aclosing(source):
            async for item in source:
                await ready.put((index, item))
        await ready.put(None)
    except Exception as error:
        await ready.put(error)


class EventStream(Response):
    """Server-sent events, each a JSON text, and [DONE] at the end.

    The next event is generated once the last has been sent: sending waits while the client does not
    read. While no event comes, a comment is sent every `comment_s`, because proxies close
    connections on which nothing comes. An error is sent as the last event.
    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[str | None],
        rest: AsyncGenerator[str, None],
        error_event: Callable[[Exception], str],
        comment_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.next_event = first
        self.rest = rest
        self.error_event = error_event
        self.comment_s = comment_s

    @classmethod
    async def start(
        cls,
        events: AsyncGenerator[str, None],
        error_event: Callable[[Exception], str],
        comment_s: float = COMMENT_S,
    ) -> "EventStream":
        """Wait for the first event, so that an error before it still has a status of its own, but
        no longer than `comment_s`.
        """
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait((first,), timeout=comment_s)
            if first.done():
                first.result()
        except BaseException:
            await cancel_and_wait((first,))
            await events.aclose()
            raise
        return cls(first, events, error_event, comment_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.rest):
            await while_connected(receive, self.send_all(send))

    async def send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            if not self.next_event.done():
                await self.send_body(send, COMMENT)
            await self.send_events(send)
        except Exception as error:
            await self.send_body(send, f"data: {self.error_event(error)}\n\n")
        finally:
            await cancel_and_wait((self.next_event,))
        await self.send_body(send, "data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_events(self, send: Send) -> None:
        while True:
            done, _ = await asyncio.wait((self.next_event,), timeout=self.comment_s)
            if not done:
                await self.send_body(send, COMMENT)
            elif (event := self.next_event.result()) is None:
                return
            else:
                await self.send_body(send, f"data: {event.translate(LINE_ENDS)}\n\n")
                self.next_event = asyncio.ensure_future(anext(self.rest, None))

    async def send_body(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
