"""Clients of a soak test: most read their whole response; some leave, read slowly, are killed, or
send nonsense."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from shardwise.measure.http_client import read_body, read_head, request_bytes

BEHAVIOURS = {
    "stays": 50, "leaves": 22, "leaves at once": 8, "breaks off": 5, "reads slowly": 8,
    "is killed": 2, "sends nonsense": 5,
}  # fmt: skip
"""Behaviours of clients, in percent. "breaks off": within its request; "leaves": within the
response."""
PATHS = {"/v1/completions": 5, "/v1/chat/completions": 4, "/v1/embeddings": 1}
LETTERS = "aaeeiioutnrsldcmp       é日🗼\n"
NUM_PREFIXES = 4
"""Beginnings that prompts share, so that there are hits in the prefix cache."""
NONSENSE: tuple[Mapping[str, Any], ...] = (
    {"model": 1}, {"prompt": [], "messages": [], "input": []},
    {"prompt": [-1], "messages": [1], "input": [1 << 40]},
    {"prompt": {"a": 1}, "messages": "a", "input": None},
)  # fmt: skip
SLOW_BYTES = 2048
SLOW_S = 0.02
BUSY_S = 0.1
KILLED_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
connection.recv(1)
print(flush=True)
connection.recv(1 << 30, socket.MSG_WAITALL)
"""
"""A client that reads on, once its response has begun."""


@dataclass(frozen=True)
class RunningServer:
    """A server: its URL without /v1, its API key, and its processes by name; the first has the
    sockets."""

    url: str
    api_key: str
    pids: Mapping[str, int]


@dataclass(frozen=True)
class ClientRequest:
    """One request and the behaviour of its client.

    Attributes:
        leaves_after: Chunks of the response after which the client leaves; None if it stays.
        aborts: Reset the connection instead of closing it.
    """

    path: str
    body: Mapping[str, Any]
    behaviour: str
    leaves_after: int | None
    aborts: bool


@dataclass
class Tally:
    """Requests by behaviour, responses by status, and faults of responses."""

    behaviours: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.behaviours.total()


def draw_request(rng: random.Random, max_len: int) -> ClientRequest:
    """Draw a request to a server with a context length of `max_len`, at one byte per token."""
    (path,) = rng.choices(list(PATHS), list(PATHS.values()))
    (behaviour,) = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
    texts = draw_texts(rng, max_len // 10)
    has_logprobs = path != "/v1/embeddings" and rng.random() < 0.2
    if path == "/v1/embeddings":
        body: dict[str, Any] = {"input": texts}
    elif path == "/v1/completions":
        body = {"prompt": texts, **draw_params(rng, max_len)}
        if has_logprobs:
            body |= {"echo": rng.random() < 0.5, "logprobs": rng.choice((0, 3, 20)), "n": 1}
    else:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"messages": messages, **draw_params(rng, max_len)}
        if has_logprobs:
            body |= {"logprobs": True, "top_logprobs": rng.choice((0, 5))}
    if behaviour == "sends nonsense":
        body |= rng.choice(NONSENSE)
    leaves_after = rng.randrange(1, 20) if behaviour == "leaves" else None
    return ClientRequest(path, body, behaviour, leaves_after, rng.random() < 0.5)


def draw_texts(rng: random.Random, max_characters: int) -> list[str]:
    """Draw one or two texts with a shared beginning, each of two parts of random length."""
    num_texts = rng.choice((1, 1, 1, 2))
    prefix = random.Random(rng.randrange(NUM_PREFIXES))
    limit = max_characters // num_texts
    texts = []
    for _ in range(num_texts):
        letters = prefix.choices(LETTERS, k=rng.randrange(1, limit))
        letters += rng.choices(LETTERS, k=rng.randrange(limit))
        texts.append("".join(letters))
    return texts


def draw_params(rng: random.Random, max_len: int) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 40)),
        "repetition_penalty": rng.choice((1.0, 1.1)),
        "max_tokens": rng.randrange(1, max_len // 8),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(1 << 30),
        "stop": rng.choice((None, None, "e", ["aa", "é"])),
        "priority": rng.choice((0, 0, 1)),
        "cache_salt": rng.choice((None, "tenant")),
        "stream": rng.random() < 0.6,
    }


async def send(server: RunningServer, request: ClientRequest, tally: Tally) -> None:
    """Send one request on its own connection, with its client's behaviour."""
    tally.behaviours[request.behaviour] += 1
    url = urlsplit(server.url)
    data = request_bytes(url.netloc, request.path, server.api_key, dict(request.body))
    if request.behaviour == "is killed":
        await send_and_be_killed(str(url.hostname), url.port or 80, data)
        return
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=SLOW_BYTES)
    try:
        writer.write(data[:-5] if request.behaviour == "breaks off" else data)
        await writer.drain()
        if request.behaviour not in ("breaks off", "leaves at once"):
            await read_response(reader, request, tally)
    except (OSError, EOFError, ValueError, IndexError) as error:
        tally.failures.append(f"{request.path}: the connection broke: {error!r}")
    finally:
        if request.aborts:
            writer.transport.abort()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def read_response(reader: asyncio.StreamReader, request: ClientRequest, tally: Tally) -> None:
    """Read the response as far as the client does, and check it if that is to its end."""
    status, headers = await read_head(reader)
    tally.statuses[status] += 1
    body = b""
    num_chunks = 0
    async with aclosing(read_body(reader, headers)) as chunks:
        async for chunk in chunks:
            body += chunk
            num_chunks += 1
            if num_chunks == request.leaves_after:
                return
            if request.behaviour == "reads slowly":
                await asyncio.sleep(SLOW_S)
    if (fault := find_fault(request, status, body)) is not None:
        tally.failures.append(fault)
    if status == 429:
        await asyncio.sleep(BUSY_S)


def find_fault(request: ClientRequest, status: int, body: bytes) -> str | None:
    """Return what is wrong with a response that was read to its end; None if nothing is."""
    expected = (400,) if request.behaviour == "sends nonsense" else (200, 429)
    if status not in expected:
        return f"{request.path}: {status}: {body[:300]!r} to {request.body}"
    is_complete = body.endswith(b"[DONE]\n\n") and b'data: {"error"' not in body
    if status == 200 and request.body.get("stream") and not is_complete:
        return f"{request.path}: a stream ended with {body[-300:]!r}"
    return None


async def send_and_be_killed(host: str, port: int, request: bytes) -> None:
    """Send from another process, which is killed at the first byte of the response."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-S", "-c", KILLED_CLIENT, host, str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    process.stdin.close()
    await process.stdout.readline()
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
