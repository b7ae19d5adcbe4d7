"""What `shardwise bench serve` measures: an engine of our own without HTTP, or a server behind a
URL.

Of HTTP it needs little, and its own work shares the cores with what is measured, so it speaks just
that: one request a connection, the answer as a stream of server-sent events.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

from shardwise.measure.load_test import Failed
from shardwise.serve.engine_client import Engine, EngineDied, QueueFull
from shardwise.serve.request import Ask, SamplingParams


class EngineTarget:
    """An engine in a process of its own, asked as a server asks it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vocab_size: int | None = engine.vocab_size
        self.max_len: int | None = engine.max_len

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, heard: Callable[[], None]
    ) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        num_tokens = 0
        try:
            async with aclosing(self.engine.generate(Ask(tuple(prompt), params))) as pieces:
                async for piece in pieces:
                    if piece.finish_reason == "error":
                        raise Failed("the request failed inside the model")
                    num_tokens += len(piece.tokens)
                    heard()
        except (ValueError, QueueFull, EngineDied) as error:
            raise Failed(str(error)) from None
        return num_tokens


class UrlTarget:
    """A server of OpenAI's API at `url`, which ends in /v1; `model` is what it calls the model it
    is to use."""

    vocab_size: int | None = None
    max_len: int | None = None

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.api_key = api_key

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, heard: Callable[[], None]
    ) -> int:
        """Every event with a choice counts as a token until the server says how many there were.
        `ignore_eos` is no parameter of OpenAI's, but of all servers that one hosts oneself."""
        asked = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        num_tokens = 0
        async with aclosing(events(self.url + "/completions", self.api_key, asked)) as told:
            async for event in told:
                if "error" in event:
                    raise Failed(sentence_of(event))
                if event.get("choices"):
                    heard()
                    num_tokens += 1
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
        return num_tokens


async def first_model(url: str, api_key: str | None) -> str:
    """What a server calls its model. Raises ValueError if it cannot be asked."""
    try:
        async with (
            asyncio.timeout(10),
            aclosing(exchange(url.rstrip("/") + "/models", api_key)) as parts,
        ):
            name: str = json.loads(b"".join([part async for part in parts]))["data"][0]["id"]
    except (Failed, TimeoutError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the models of {url} cannot be asked for: {error or 'no answer'}"
        ) from None
    return name


async def events(
    url: str, api_key: str | None, asked: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, without the [DONE] at its end."""
    rest = b""
    async with aclosing(exchange(url, api_key, asked)) as parts:
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    try:
                        yield json.loads(data)
                    except ValueError:
                        raise Failed(f"an event is no JSON: {data[:200]!r}") from None


async def exchange(
    url: str, api_key: str | None, asked: dict[str, Any] | None = None
) -> AsyncGenerator[bytes, None]:
    """GET, or POST of JSON: the body of the answer in parts, as they come. Raises Failed for all
    that goes wrong."""
    to = urlsplit(url)
    secure = to.scheme == "https"
    try:
        reader, writer = await asyncio.open_connection(
            to.hostname, to.port or (443 if secure else 80), ssl=secure or None
        )
    except OSError as error:
        raise Failed(f"{to.netloc} cannot be reached: {error}") from None
    try:
        writer.write(request_bytes(to.netloc, f"{to.path}?{to.query}".rstrip("?"), api_key, asked))
        status, headers = await read_head(reader)
        parts = read_body(reader, headers)
        if status != 200:
            body = b"".join([part async for part in parts])
            raise Failed(f"{status}: {sentence_of(body)}")
        async for part in parts:
            yield part
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise Failed(f"the connection broke, or what came is no HTTP: {error}") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def request_bytes(host: str, path: str, api_key: str | None, asked: dict[str, Any] | None) -> bytes:
    body = b"" if asked is None else json.dumps(asked).encode()
    headers = {
        "Host": host,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    } | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    lines = [
        f"{'GET' if asked is None else 'POST'} {path} HTTP/1.1",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def read_body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """In chunks (RFC 9112, section 7.1), or to the end of the connection."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        left = int(headers.get("content-length", 1 << 62))
        while left and (part := await reader.read(min(left, 1 << 16))):
            left -= len(part)
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readline()


def sentence_of(told: bytes | dict[str, Any]) -> str:
    """The message of an error as OpenAI's API has it, or what there is instead."""
    try:
        event = json.loads(told) if isinstance(told, bytes) else told
        return str(event["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return repr(told[:200]) if isinstance(told, bytes) else json.dumps(told)
