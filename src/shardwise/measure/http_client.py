"""Backends of a load test: an engine of this package without HTTP, or an OpenAI-compatible server.

The HTTP/1.1 client is minimal, because it shares the cores with the server that it measures: one
request per connection, and the response as a stream of server-sent events.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

from shardwise.measure.load_test import RequestFailed
from shardwise.serve.engine_client import EngineClient, EngineDied, QueueFull
from shardwise.serve.request import Request, SamplingParams
from shardwise.writing.json_text import json_text


class EngineBackend:
    """An engine in its own process, called as the HTTP server calls it."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.vocab_size: int | None = engine.vocab_size
        self.max_len: int | None = engine.max_len

    async def complete(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[], None]
    ) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        num_tokens = 0
        try:
            async with aclosing(self.engine.generate(Request(tuple(prompt), params))) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "error":
                        raise RequestFailed("the request failed in the forward pass")
                    num_tokens += len(delta.tokens)
                    on_tokens()
        except (ValueError, QueueFull, EngineDied) as error:
            raise RequestFailed(str(error)) from None
        return num_tokens


class HttpBackend:
    """An OpenAI-compatible server at `url`, which ends in /v1; `model` is its name in the API."""

    vocab_size: int | None = None
    max_len: int | None = None

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.api_key = api_key

    async def complete(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[], None]
    ) -> int:
        """Count every event with a choice as one token, unless the server reports usage.

        `ignore_eos` is not in OpenAI's API, but all self-hosted servers take it.
        """
        payload = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        num_tokens = 0
        url = self.url + "/completions"
        async with aclosing(stream_events(url, self.api_key, payload)) as events:
            async for event in events:
                if "error" in event:
                    raise RequestFailed(error_message(event))
                if event.get("choices"):
                    on_tokens()
                    num_tokens += 1
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
        return num_tokens


async def first_model(url: str, api_key: str | None) -> str:
    """Return the name of the server's first model. Raises ValueError if it cannot be listed."""
    models_url = url.rstrip("/") + "/models"
    try:
        async with asyncio.timeout(10), aclosing(send_request(models_url, api_key)) as chunks:
            name: str = json.loads(b"".join([chunk async for chunk in chunks]))["data"][0]["id"]
    except (RequestFailed, TimeoutError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the models of {url} cannot be listed: {error or 'no response'}"
        ) from None
    return name


async def stream_events(
    url: str, api_key: str | None, payload: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed response, without the [DONE] at its end."""
    rest = b""
    async with aclosing(send_request(url, api_key, payload)) as chunks:
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    try:
                        yield json.loads(data)
                    except ValueError:
                        raise RequestFailed(f"an event is not JSON: {data[:200]!r}") from None


async def send_request(
    url: str, api_key: str | None, payload: dict[str, Any] | None = None
) -> AsyncGenerator[bytes, None]:
    """GET, or POST of JSON: yield the body of the response in chunks, as they arrive.

    Raises RequestFailed for a connection, response or status that is not a success.
    """
    parsed = urlsplit(url)
    is_https = parsed.scheme == "https"
    port = parsed.port or (443 if is_https else 80)
    try:
        reader, writer = await asyncio.open_connection(parsed.hostname, port, ssl=is_https or None)
    except OSError as error:
        raise RequestFailed(f"cannot connect to {parsed.netloc}: {error}") from None
    try:
        path = f"{parsed.path}?{parsed.query}".rstrip("?")
        writer.write(request_bytes(parsed.netloc, path, api_key, payload))
        status, headers = await read_head(reader)
        chunks = read_body(reader, headers)
        if status != 200:
            body = b"".join([chunk async for chunk in chunks])
            raise RequestFailed(f"{status}: {error_message(body)}")
        async for chunk in chunks:
            yield chunk
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise RequestFailed(f"the connection broke or the response is not HTTP: {error}") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request_bytes(
    host: str, path: str, api_key: str | None, payload: dict[str, Any] | None
) -> bytes:
    method = "GET" if payload is None else "POST"
    body = b"" if payload is None else json_text(payload).encode()
    headers = {
        "Host": host,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, by lower-case name."""
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def read_body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield a chunked body (RFC 9112, section 7.1), or one up to the end of the connection."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        num_left = int(headers.get("content-length", 1 << 62))
        while num_left and (chunk := await reader.read(min(num_left, 1 << 16))):
            num_left -= len(chunk)
            yield chunk
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


def error_message(error: bytes | dict[str, Any]) -> str:
    """Return the message of an OpenAI error, or the beginning of anything else."""
    try:
        event = json.loads(error) if isinstance(error, bytes) else error
        return str(event["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(error[:200]) if isinstance(error, bytes) else json_text(error)
