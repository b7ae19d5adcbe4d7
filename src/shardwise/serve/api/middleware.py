"""Middleware of the server: request ids, API keys, the limit of a body's size, and admission.

It is ASGI middleware (https://asgi.readthedocs.io/en/latest/specs/www.html) around the whole
application, so that every endpoint is behind it.
"""

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.serve.api.errors import RETRY_LATER, ApiError, to_api_error
from shardwise.serve.api.log import LOG, log_request
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.streaming import ClientDisconnected

OPEN_PATH = "/health"
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class Admission:
    """Counts the requests in flight; once closed, it admits no new ones."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def check_open(self) -> None:
        """Raise a 503 if closed."""
        if self.is_closed:
            raise ApiError(
                503,
                "the server is shutting down and accepts no new requests",
                "draining",
                headers=RETRY_LATER,
            )

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request while the block runs. Raises a 503 if closed."""
        self.check_open()
        self.num_in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait for all requests; return how many are left after `timeout_s`."""
        self.is_closed = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        return self.num_in_flight


class RequestMiddleware:
    """Passes a request on to `app`, or responds with an error, including those `app` raises."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body_bytes: int,
        body_timeout_s: float,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self.app = app
        self.api_keys = api_keys
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.admission = admission
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None
        start_s = time.monotonic()

        method = scope["method"]
        if method == "HEAD":  # the response of GET without its body
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self.handle(scope, headers, receive, send_with_id)
        except ClientDisconnected:
            self.metrics.errors.labels("client_disconnected").inc()
        except Exception as error:
            api_error = to_api_error(error)
            self.metrics.errors.labels(api_error.code).inc()
            if api_error.status == 500:
                LOG.exception("request %s failed", request_id)
            if status is not None:
                raise
            await api_error.response()(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - start_s
            log_request(method, scope["path"], status, seconds, request_id)

    async def handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Authenticate the request, read its body and admit it, then pass it on.

        A request counts as in flight once its body has arrived: slow clients hold up no drain.
        """
        scope["state"]["tenant"] = ""
        if self.api_keys and scope["path"] != OPEN_PATH:
            scope["state"]["tenant"] = self.check_api_key(headers.get("authorization", ""))
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self.admission.check_open()
        try:
            async with asyncio.timeout(self.body_timeout_s):
                receive = await self.read_body(headers, receive)
        except TimeoutError:
            message = f"the body has not arrived within {self.body_timeout_s:g} s"
            raise ApiError(408, message, "timeout", headers={"connection": "close"}) from None
        with self.admission.admit():
            await self.app(scope, receive, send)

    def check_api_key(self, authorization: str) -> str:
        """Return which tenant a key stands for.

        Raises a 401 for a wrong key, in a time that depends neither on the key nor on which.
        """
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, each.encode()) for each in self.api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = (
                "invalid API key" if key else "missing API key; send Authorization: Bearer KEY"
            )
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, message, "invalid_api_key", headers=headers)
        return f"key {matches.index(True)}"

    async def read_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the whole body, up to the limit; return a `receive` that yields it at once."""
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            raise self.too_large()
        chunks = list[bytes]()
        size = 0
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            has_more = message.get("more_body", False)
            if size > self.max_body_bytes:
                raise self.too_large()
        body: list[Message] = [
            {"type": "http.request", "body": b"".join(chunks), "more_body": False}
        ]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        return replay

    def too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than the limit of {self.max_body_bytes} bytes", "too_large"
        )
