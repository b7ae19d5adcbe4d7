"""Answers that take a while: work that ends when its client leaves, several streams as one, and
server-sent events.

Whatever is started here is awaited here: when a function returns, raises or is cancelled, no task
of it is left.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientLeft(Exception):
    """The client has closed its connection: there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves before, the work is cancelled at once and
    ClientLeft raised.

    `receive` is that of a request whose body has been read, so that a disconnect is all that can
    still come.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeft
        return worker.result()
    finally:
        await end((worker, watcher))


async def disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of its source, item), as they come; the first error ends all.

    Nothing is read ahead beyond one item a source, so that a slow reader slows its sources and
    fills no memory.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield 0, only
        return
    ready: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(sources))
    tasks = [
        asyncio.create_task(pour(number, source, ready)) for number, source in enumerate(sources)
    ]
    try:
        num_open = len(sources)
        while num_open:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await end(tasks)


async def pour(
    number: int,
    source: AsyncGenerator[T, None],
    ready: asyncio.Queue[tuple[int, T] | Exception | None],
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await ready.put((number, item))
        await ready.put(None)
    except Exception as error:
        await ready.put(error)


class EventStream(Response):
    """Server-sent events, each a JSON text, and [DONE] at the end.

    An event is made when the one before it has gone out: writing waits while the client does not
    read. An error on the way is the last event.
    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: str, rest: AsyncGenerator[str, None], as_event: Callable[[Exception], str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.first = first
        self.rest = rest
        self.as_event = as_event

    @classmethod
    async def start(
        cls, events: AsyncGenerator[str, None], as_event: Callable[[Exception], str]
    ) -> "EventStream":
        """Waits for the first event, so that what fails before it is still an answer with a status
        of its own."""
        return cls(await anext(events), events, as_event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.rest):
            await while_connected(receive, self.send_all(send))

    async def send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            await self.send_event(send, self.first)
            async for event in self.rest:
                await self.send_event(send, event)
        except Exception as error:
            await self.send_event(send, self.as_event(error))
        await self.send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_event(self, send: Send, data: str) -> None:
        await send(
            {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        )
