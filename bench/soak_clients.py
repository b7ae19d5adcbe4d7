"""Clients as they are: most stay for their answer, some leave, read slowly, are killed, or ask for
nonsense."""

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
    "stays": 50, "leaves": 22, "leaves at once": 8, "breaks off": 5, "reads slowly": 8, "is killed": 2,
    "asks nonsense": 5,
}  # fmt: skip
"""How clients behave, and how many of a hundred do: "breaks off" is within what is sent, "leaves"
within the answer."""
PATHS = {"/v1/completions": 5, "/v1/chat/completions": 4, "/v1/embeddings": 1}
LETTERS = "aaeeiioutnrsldcmp       é日🗼\n"
STEMS = 4
"""Beginnings that prompts share, so that pages are found and shared."""
NONSENSE: tuple[Mapping[str, Any], ...] = (
    {"model": 1}, {"prompt": [], "messages": [], "input": []}, {"prompt": [-1], "messages": [1], "input": [1 << 40]},
    {"prompt": {"a": 1}, "messages": "a", "input": None},
)  # fmt: skip
SLOW_BYTES = 2048
SLOW_S = 0.02
BUSY_S = 0.1
KILLED = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
connection.recv(1)
print(flush=True)
connection.recv(1 << 30, socket.MSG_WAITALL)
"""
"""A client that waits for more, once its answer has begun."""


@dataclass(frozen=True)
class Served:
    """A server that runs: its URL without /v1, its key, and its processes, of which the first has
    the sockets."""

    url: str
    api_key: str
    pids: Mapping[str, int]


@dataclass(frozen=True)
class Drawn:
    """One request, and how its client behaves: leaves after so many parts of the answer, if it
    does, and whether it aborts its connection or closes it."""

    path: str
    body: Mapping[str, Any]
    behaviour: str
    leaves_after: int | None
    aborts: bool


@dataclass
class Tally:
    """How many clients behaved how, how they were answered, and what was wrong with that."""

    behaviours: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.behaviours.total()


def draw(rng: random.Random, max_len: int) -> Drawn:
    """Anything that can be asked of a server with room for `max_len` tokens in a request, each a
    byte or more."""
    (path,) = rng.choices(list(PATHS), list(PATHS.values()))
    (behaviour,) = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
    num_texts = rng.choice((1, 1, 1, 2))
    stem = random.Random(rng.randrange(STEMS))
    most = max_len // 10 // num_texts
    texts = [
        "".join(
            [
                *stem.choices(LETTERS, k=rng.randrange(1, most)),
                *rng.choices(LETTERS, k=rng.randrange(most)),
            ]
        )
        for _ in range(num_texts)
    ]
    params: dict[str, Any] = {
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
    if path == "/v1/embeddings":
        body: dict[str, Any] = {"input": texts}
    elif path == "/v1/completions":
        scored = (
            {"echo": rng.random() < 0.5, "logprobs": rng.choice((0, 3, 20))}
            if rng.random() < 0.2
            else {}
        )
        body = {"prompt": texts, **params, **scored, **({"n": 1} if scored else {})}
    else:
        scored = (
            {"logprobs": True, "top_logprobs": rng.choice((0, 5))} if rng.random() < 0.2 else {}
        )
        body = {
            "messages": [{"role": "user", "content": text} for text in texts],
            **params,
            **scored,
        }
    if behaviour == "asks nonsense":
        body |= rng.choice(NONSENSE)
    leaves_after = rng.randrange(1, 20) if behaviour == "leaves" else None
    return Drawn(path, body, behaviour, leaves_after, rng.random() < 0.5)


async def ask(served: Served, drawn: Drawn, tally: Tally) -> None:
    """One request, on a connection of its own, by a client that behaves as drawn."""
    tally.behaviours[drawn.behaviour] += 1
    to = urlsplit(served.url)
    whole = request_bytes(to.netloc, drawn.path, served.api_key, dict(drawn.body))
    if drawn.behaviour == "is killed":
        await be_killed(str(to.hostname), to.port or 80, whole)
        return
    reader, writer = await asyncio.open_connection(to.hostname, to.port, limit=SLOW_BYTES)
    try:
        writer.write(whole[:-5] if drawn.behaviour == "breaks off" else whole)
        await writer.drain()
        if drawn.behaviour not in ("breaks off", "leaves at once"):
            await read(reader, drawn, tally)
    except (OSError, EOFError, ValueError, IndexError) as error:
        tally.failures.append(f"{drawn.path}: the connection broke: {error!r}")
    finally:
        if drawn.aborts:
            writer.transport.abort()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def read(reader: asyncio.StreamReader, drawn: Drawn, tally: Tally) -> None:
    """The answer, as far as the client reads."""
    status, headers = await read_head(reader)
    tally.statuses[status] += 1
    answer = b""
    num_parts = 0
    async with aclosing(read_body(reader, headers)) as parts:
        async for part in parts:
            answer = answer + part
            num_parts = num_parts + 1
            if num_parts == drawn.leaves_after:
                return
            if drawn.behaviour == "reads slowly":
                await asyncio.sleep(SLOW_S)
    if (says := wrong(drawn, status, answer)) is not None:
        tally.failures.append(says)
    if status == 429:
        await asyncio.sleep(BUSY_S)


def wrong(drawn: Drawn, status: int, answer: bytes) -> str | None:
    """What is wrong with an answer that was read to its end."""
    if status not in ((400,) if drawn.behaviour == "asks nonsense" else (200, 429)):
        return f"{drawn.path}: {status}: {answer[:300]!r} to {drawn.body}"
    if (
        status == 200
        and drawn.body.get("stream")
        and (b'data: {"error"' in answer or not answer.endswith(b"[DONE]\n\n"))
    ):
        return f"{drawn.path}: a stream ended with {answer[-300:]!r}"
    return None


async def be_killed(host: str, port: int, request: bytes) -> None:
    """Ask from another process, which is killed when the first byte of the answer has come."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-S", "-c", KILLED, host, str(port))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    process.stdin.close()
    await process.stdout.readline()
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
