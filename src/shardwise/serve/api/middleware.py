"""The door of the server: every request gets an id, shows a key, and brings its body, none of them
without limit.

ASGI middleware (https://asgi.readthedocs.io/en/latest/specs/www.html) around the whole application,
so that no endpoint can be reached past it.
"""

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.serve.api.errors import Refused, as_refused
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.streaming import ClientLeft

OPEN_PATH = "/health"
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
RETRY_AFTER_S = 5
LOG = logging.getLogger("shardwise.serve")


class Gate:
    """Counts the requests inside, and once it is shut lets no new one in."""

    def __init__(self) -> None:
        self.is_shut = False
        self.num_inside = 0
        self.empty = asyncio.Event()
        self.empty.set()

    @contextmanager
    def passage(self) -> Iterator[None]:
        if self.is_shut:
            again = {"retry-after": str(RETRY_AFTER_S)}
            raise Refused(
                503,
                "the server is shutting down and takes no new requests",
                "draining",
                headers=again,
            )
        self.num_inside += 1
        self.empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self.empty.set()

    async def drain(self, limit_s: float) -> int:
        """Shut it and wait until all are out, `limit_s` at most; how many are still inside then."""
        self.is_shut = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.empty.wait(), limit_s)
        return self.num_inside


class Guard:
    """Lets a request through to `app`, or answers it with an error; what `app` fails to catch ends
    here too."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], max_body_bytes: int, gate: Gate, metrics: Metrics
    ) -> None:
        self.app = app
        self.keys = keys
        self.max_body_bytes = max_body_bytes
        self.gate = gate
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get("x-request-id", "")
        name = name if REQUEST_ID.fullmatch(name) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        has_begun = False

        async def send_named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self.pass_on(scope, headers, receive, send_named)
        except ClientLeft:
            self.metrics.errors.labels("client_left").inc()
        except Exception as error:
            refused = as_refused(error)
            self.metrics.errors.labels(refused.code).inc()
            if refused.status == 500:
                LOG.exception("request %s failed", name)
            if has_begun:
                raise
            await refused.response()(scope, receive, send_named)

    async def pass_on(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if self.keys and scope["path"] != OPEN_PATH:
            self.check_key(headers.get("authorization", ""))
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        with self.gate.passage():
            await self.app(scope, await self.read_body(headers, receive), send)

    def check_key(self, authorization: str) -> None:
        """The time that it takes says nothing about how much of a key was right, nor which."""
        scheme, _, given = authorization.partition(" ")
        right = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.keys]
        if scheme.lower() != "bearer" or not any(right):
            says = "the API key is wrong" if given else "give an API key: Authorization: Bearer KEY"
            raise Refused(401, says, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def read_body(self, headers: Headers, receive: Receive) -> Receive:
        """The whole body, as a `receive` that gives it at once; no more of it is held than the
        limit."""
        told = headers.get("content-length", "")
        if told.isdigit() and int(told[:20]) > self.max_body_bytes:
            raise self.too_large()
        chunks = list[bytes]()
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunks.append(message.get("body", b""))
            size = size + len(chunks[-1])
            more = message.get("more_body", False)
            if size > self.max_body_bytes:
                raise self.too_large()
        body: list[Message] = [
            {"type": "http.request", "body": b"".join(chunks), "more_body": False}
        ]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        return replay

    def too_large(self) -> Refused:
        return Refused(
            413,
            f"the body is larger than {self.max_body_bytes} bytes, the most this server reads",
            "too_large",
        )
