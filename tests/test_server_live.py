"""The server as a process's clients meet it: over sockets, with the official client, with those
that leave or do not read, and when it is told to stop."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shardwise.cli import main, parse
from shardwise.commands.serve import api_keys
from shardwise.serve.api.connections import ConnectionLimits
from shardwise.serve.api.lifetime import Server, bind
from shardwise.serve.api.server import make_app
from shardwise.serve.api.streaming import ClientDisconnected, EventStream, merge
from shardwise.serve.request import Request, SamplingParams
from shardwise.serve.settings import ServerSettings
from tiny_engine import TinyEngine, TinyModel, talking_model

pytestmark = pytest.mark.usefixtures("default_signals")

KEY = "sesame"
LIMIT_S = 30
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return talking_model()


@dataclass
class Live:
    server: Server
    ended: "asyncio.Task[None]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, **options}
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=LIMIT_S
        )


LIMITS = ConnectionLimits(max_connections=100, header_s=LIMIT_S)


@asynccontextmanager
async def serving(
    engine: TinyEngine,
    drain_s: float = LIMIT_S,
    send_buffer_bytes: int = 0,
    limits: ConnectionLimits = LIMITS,
    **changes: Any,
) -> AsyncIterator[Live]:
    listener = bind("127.0.0.1", 0)
    if send_buffer_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    settings = ServerSettings(("tiny",), (KEY,), **changes)
    server = Server(make_app(engine, settings), limits, drain_s)
    ended = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield Live(server, ended, listener.getsockname()[1])
    finally:
        if server.draining is None:
            server.stop()
        await asyncio.wait_for(ended, LIMIT_S)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def send(live: Live, path: str, body: dict[str, Any], receive_buffer_bytes: int = 0) -> Any:
    """A request on a connection of its own: (reader, writer)."""
    connection = socket.socket()
    if receive_buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.connect(("127.0.0.1", live.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: "
        f"application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    return reader, writer


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


# The official client


def test_the_official_client_works_unchanged(model: TinyModel) -> None:
    async def scenario() -> None:
        async with serving(TinyEngine(model)) as live, live.client() as client:
            assert [each.id async for each in client.models.list()] == ["tiny"]
            chat = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                temperature=0,
                max_completion_tokens=20,
                logprobs=True,
                top_logprobs=2,
            )
            logprobs = chat.choices[0].logprobs
            assert (
                logprobs is not None
                and logprobs.content is not None
                and len(logprobs.content[0].top_logprobs) == 2
            )
            stream = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                temperature=0,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            said = "".join(
                chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
            )
            told = chunks[-1].usage
            usage = chat.usage
            assert (
                said == chat.choices[0].message.content and told is not None and usage is not None
            )
            assert (
                told.total_tokens
                == usage.total_tokens
                == usage.prompt_tokens + usage.completion_tokens
            )
            text = await client.completions.create(
                model="tiny", prompt=["aa", "bb"], max_tokens=5, logprobs=1, echo=True
            )
            assert [choice.text[:2] for choice in text.choices] == ["aa", "bb"]
            parts = await client.completions.create(
                model="tiny", prompt="a", max_tokens=5, stream=True, seed=1
            )
            whole = await client.completions.create(model="tiny", prompt="a", max_tokens=5, seed=1)
            assert "".join([part.choices[0].text async for part in parts]) == whole.choices[0].text
            vectors = await client.embeddings.create(
                model="tiny", input=["a", "bc"]
            )  # asks for base64 by itself
            assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 64

    run(scenario())


def test_the_official_client_knows_our_errors(model: TinyModel) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine) as live, live.client() as client:
            with pytest.raises(openai.BadRequestError, match="greedy") as refused:
                await client.completions.create(model="tiny", prompt="a", temperature=-1)
            assert (refused.value.param, refused.value.type) == (
                "temperature",
                "invalid_request_error",
            )
            with pytest.raises(openai.NotFoundError, match="unknown model 'nobody'"):
                await client.completions.create(model="nobody", prompt="a")
            async with live.client(api_key="wrong") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            for name in range(-64, 0):
                engine.engine.add(Request((1,), SamplingParams(max_tokens=1), request_id=name))
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="tiny", prompt="a")
            for name in range(-64, 0):
                engine.engine.abort(name)
            engine.death = "the engine was killed"
            with pytest.raises(openai.InternalServerError, match="killed"):
                await client.completions.create(model="tiny", prompt="a")
            engine.death = None
            stream = await client.completions.create(
                model="tiny", prompt="a", max_tokens=99, stream=True
            )
            with pytest.raises(openai.APIError, match="killed"):
                async for _ in stream:
                    engine.death = "the engine was killed"

    run(scenario())


# Clients that leave, and clients that do not read

BODIES = {
    "/v1/completions": {"prompt": ["ab", "c"], "n": 2, "max_tokens": 100, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("when", ["waiting, whole", "waiting, stream", "streaming", "reset"])
def test_a_client_that_leaves_ends_its_request_at_once(
    model: TinyModel, path: str, when: str
) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine) as live:
            tasks = asyncio.all_tasks()
            if "waiting" in when:
                engine.may_step.clear()
            reader, writer = await send(
                live, path, {**BODIES[path], "stream": when != "waiting, whole"}
            )
            if "waiting" in when:
                await until(lambda: engine.num_running > 0)
            else:
                await reader.readuntil(b"data: ")
                engine.may_step.clear()
            writer.transport.abort() if when == "reset" else writer.close()
            await until(lambda: engine.num_running == 0)  # though no step is ever made again
            await until(lambda: asyncio.all_tasks() <= tasks)
            async with live.http() as client:
                assert (
                    'errors_total{kind="client_disconnected"} 1.0'
                    in (await client.get("/metrics")).text
                )

    run(scenario())


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(model: TinyModel) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine, send_buffer_bytes=4096) as live, live.client() as client:
            body = {
                "prompt": "a",
                "max_tokens": 250,
                "ignore_eos": True,
                "logprobs": 20,
                "stream": True,
                "seed": 1,
            }
            reader, writer = await send(live, "/v1/completions", body, receive_buffer_bytes=4096)
            await reader.readuntil(b"data: ")
            for _ in range(5):
                await client.completions.create(
                    model="tiny", prompt="b", max_tokens=60, extra_body={"ignore_eos": True}
                )
            assert (engine.num_running, live.server.admission.num_in_flight) == (
                0,
                1,
            )  # all is made, but it does not go out
            received = b""
            while b"data: [DONE]" not in received:
                received += await reader.read(65536)
            assert received.count(b'"finish_reason":"length"') == 1
            assert received.count(b'"finish_reason":null') == 249
            writer.close()

    run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_that_waits_sends_comments(fails: bool) -> None:
    """An error that comes early has a status of its own, one that comes later is an event."""

    async def scenario() -> None:
        sent = list[bytes]()
        goes_on = asyncio.Event()

        async def events() -> AsyncGenerator[str, None]:
            for number in range(2):
                await goes_on.wait()
                goes_on.clear()
                if fails:
                    raise ValueError("too late")
                yield str(number)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send_message(message: Any) -> None:
            sent.append(message.get("body", b"start"))

        def num_comments() -> int:
            return sent.count(b": waiting\n\n")

        goes_on.set()
        if fails:
            with pytest.raises(ValueError, match="too late"):
                await EventStream.start(events(), str)
        goes_on.clear()
        response = await EventStream.start(events(), str, comment_s=0.001)
        response.comment_s = LIMIT_S
        task = asyncio.create_task(response({"type": "http"}, receive, send_message))
        await until(lambda: num_comments() >= 1)  # at once
        response.comment_s = 0.001
        assert sent[:2] == [b"start", b": waiting\n\n"]
        goes_on.set()
        if not fails:
            await until(lambda: b"data: 0\n\n" in sent)
            num_before = num_comments()
            await until(lambda: num_comments() > num_before)
            goes_on.set()
        await task
        data = [body for body in sent if body.startswith(b"data")]
        first = [b"data: too late\n\n"] if fails else [b"data: 0\n\n", b"data: 1\n\n"]
        assert data == [*first, b"data: [DONE]\n\n"] and sent[-2:] == [data[-1], b""]

    run(scenario())


def test_an_event_is_made_when_the_one_before_has_gone_out() -> None:
    async def scenario() -> None:
        made = []
        sent = list[bytes]()
        may_send = asyncio.Semaphore(0)

        async def events() -> AsyncGenerator[str, None]:
            for number in range(10):
                made.append(number)
                yield str(number)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send_slowly(message: Any) -> None:
            await may_send.acquire()
            sent.append(message.get("body", b""))

        response = await EventStream.start(events(), str)
        task = asyncio.create_task(response({"type": "http"}, receive, send_slowly))
        for number in range(1, 13):
            may_send.release()
            await until(lambda number=number: len(sent) == number)  # type: ignore[misc]
            assert len(made) <= max(1, number)
        may_send.release()
        await task
        assert sent[-2:] == [b"data: [DONE]\n\n", b""] and len(made) == 10

    run(scenario())


def test_a_reader_that_leaves_while_it_is_waited_for_ends_what_it_reads() -> None:
    async def scenario() -> None:
        ended = []
        has_left = asyncio.Event()

        async def endless() -> AsyncGenerator[str, None]:
            try:
                while True:
                    yield "more"
            finally:
                ended.append(True)

        async def receive() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send_never(message: Any) -> None:
            has_left.set()
            await asyncio.Event().wait()

        events = endless()
        response = await EventStream.start(events, str)
        with pytest.raises(ClientDisconnected):
            await response({"type": "http"}, receive, send_never)
        assert ended

    run(scenario())


def test_merged_streams_end_together() -> None:
    async def scenario() -> None:
        ended = []

        async def count(name: str, stop: int, fails: bool) -> AsyncGenerator[str, None]:
            try:
                for number in range(stop):
                    await asyncio.sleep(0)
                    yield f"{name}{number}"
                if fails:
                    raise ValueError(name)
                await asyncio.sleep(0)
            finally:
                ended.append(name)

        tasks = asyncio.all_tasks()
        items = [item async for item in merge([count("a", 3, False), count("b", 5, False)])]
        assert sorted(items) == [(0, f"a{i}") for i in range(3)] + [(1, f"b{i}") for i in range(5)]
        with pytest.raises(ValueError, match="b"):
            async for _ in merge([count("a", 10**9, False), count("b", 2, True)]):
                pass
        async with aclosing(merge([count("a", 10**9, False), count("b", 10**9, False)])) as endless:
            await anext(endless)
        assert sorted(ended) == ["a", "a", "a", "b", "b", "b"] and asyncio.all_tasks() == tasks

    run(scenario())


def test_random_requests_with_random_aborts_leave_nothing_behind(model: TinyModel) -> None:
    draw = random.Random(6)

    def body() -> dict[str, Any]:
        return {
            "prompt": draw.choice(["a", ["a", "bc"], [97, 98], ["x"] * 5]),
            "messages": MESSAGES,
            "n": draw.choice([1, 1, 2]),
            "max_tokens": draw.randrange(1, 30),
            "stream": draw.random() < 0.6,
            "ignore_eos": True,
            "temperature": draw.choice([0, 1, 1, -1]),
        }

    async def one(client: httpx.AsyncClient) -> None:
        leaves_after = draw.choice([0, 1, 5, 10**6])
        async with client.stream("POST", draw.choice(list(BODIES)), json=body()) as answer:
            number = 0
            async for _ in answer.aiter_lines():
                number += 1
                if number > leaves_after:
                    return

    async def impatient(client: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(draw.random() * 0.2):
                await one(client)
        except TimeoutError:
            pass

    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine) as live:
            tasks = asyncio.all_tasks()
            async with live.http() as client:
                for _ in range(8):
                    await asyncio.gather(
                        *(draw.choice([one, impatient])(client) for _ in range(16))
                    )
                await until(lambda: engine.num_running == 0)
                assert 'shardwise_kv_pages{state="used"} 0.0' in (await client.get("/metrics")).text
            await until(lambda: asyncio.all_tasks() <= tasks)
            assert live.server.admission.num_in_flight == 0

    run(scenario())


# Slow clients

HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
GET = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SLOW_BODY = f"{HEAD}content-length: 9\r\n\r\n{{"


async def connect(live: Live, text: str = "") -> Any:
    """Open a connection and send `text`: (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(text.encode())
    return reader, writer


async def ending(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), LIMIT_S)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("before", "head"), [("", ""), ("", HEAD), (GET, HEAD)])
def test_a_head_that_does_not_arrive_ends_its_connection(
    model: TinyModel, before: str, head: str
) -> None:
    """The first, and one after another request; requests that arrive are not affected."""

    async def scenario() -> None:
        limits = ConnectionLimits(100, header_s=0.05)
        async with serving(TinyEngine(model), limits=limits) as live, live.http() as client:
            reader, writer = await connect(live, before)
            if before:
                await reader.readuntil(b'{"status":"ok"}')
            writer.write(head.encode())
            assert await ending(reader) == b""
            writer.close()
            assert (await client.get("/health")).status_code == 200

    run(scenario())


def test_a_body_that_does_not_arrive_is_a_408(model: TinyModel) -> None:
    async def scenario() -> None:
        async with serving(TinyEngine(model), body_timeout_s=0.05) as live:
            reader, writer = await connect(live, SLOW_BODY)
            received = await ending(reader)
            assert received.startswith(b"HTTP/1.1 408") and b"within 0.05 s" in received
            writer.close()

    run(scenario())


def test_idle_connections_make_room_and_busy_ones_do_not(model: TinyModel) -> None:
    async def scenario() -> None:
        limits = ConnectionLimits(3, header_s=LIMIT_S)
        async with serving(TinyEngine(model), limits=limits) as live:
            open_ones = live.server.server_state.connections
            first, first_writer = await connect(live, "GET")
            writers = [(await connect(live))[1] for _ in range(2)]
            await until(lambda: len(open_ones) == 3)
            _, busy = await connect(live, SLOW_BODY)
            assert await ending(first) == b""  # it has waited longest
            busy_ones = [busy, *[(await connect(live, SLOW_BODY))[1] for _ in range(2)]]
            await until(lambda: sum(not each.is_waiting for each in open_ones) == 3)
            reader, last = await connect(live)
            refusal = await ending(reader)
            assert refusal.startswith(b"HTTP/1.1 503") and b"retry-after: 5\r\n" in refusal
            assert b"too_many_connections" in refusal and len(open_ones) == 3
            for writer in (first_writer, *writers, *busy_ones, last):
                writer.close()

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_slow_bodies_hold_up_no_drain(model: TinyModel, path: str) -> None:
    async def scenario() -> None:
        async with serving(TinyEngine(model)) as live:
            _, writer = await connect(live, SLOW_BODY.replace("/v1/completions", path))
            await until(lambda: bool(live.server.server_state.tasks))
            live.server.stop()
            await asyncio.wait_for(live.ended, LIMIT_S / 2)
            assert live.server.num_cut_off == 0
            writer.close()

    run(scenario())


# Starting and stopping


def test_a_signal_ends_it_after_the_running_requests(
    model: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine) as live, live.http() as client, live.client() as inside:
            engine.may_step.clear()
            waiting = asyncio.create_task(
                inside.completions.create(model="tiny", prompt="a", max_tokens=3)
            )
            await until(lambda: engine.num_running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: live.server.admission.is_closed)
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            assert not live.ended.done() and not engine.is_closed
            engine.may_step.set()
            assert (await waiting).choices[0].finish_reason in ("length", "stop")
            await asyncio.wait_for(live.ended, LIMIT_S)
            assert engine.is_closed and live.server.num_cut_off == 0
            assert f"shardwise: ready at {live.url}\n" in capfd.readouterr().err

    run(scenario())


@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_requests_that_do_not_end_are_cut_off(model: TinyModel, how: str) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with (
            serving(engine, drain_s=0.01 if how == "limit" else LIMIT_S) as live,
            live.client() as client,
        ):
            engine.may_step.clear()
            waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="a"))
            await until(lambda: engine.num_running == 1)
            live.server.stop()
            if how == "second signal":
                await until(lambda: live.server.admission.is_closed)
                live.server.stop()
            await asyncio.wait_for(live.ended, LIMIT_S)
            assert (engine.num_running, live.server.num_cut_off, engine.is_closed) == (0, 1, True)
            with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
                await waiting

    run(scenario())


def test_a_stream_that_is_cut_off_says_so(
    model: TinyModel, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine, drain_s=0.01) as live:
            tasks = asyncio.all_tasks()
            body = {"prompt": "a", "n": 2, "max_tokens": 200, "ignore_eos": True, "stream": True}
            reader, writer = await send(live, "/v1/completions", body)
            await reader.readuntil(b"data: ")
            engine.may_step.clear()
            live.server.stop()
            received = await reader.read()
            events = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
            assert b"the server is shutting down" in events[-2] and events[-1] == b"data: [DONE]"
            writer.close()
            await asyncio.wait_for(live.ended, LIMIT_S)
            assert live.server.num_cut_off == 1 and asyncio.all_tasks() <= tasks

    run(scenario())
    assert "Traceback" not in capfd.readouterr().err


STUCK = """
import asyncio, threading
from shardwise.formats.tokenizers.train_bpe import byte_tokenizer
from shardwise.serve.api import lifetime
from shardwise.serve.settings import ServerSettings

class Engine:
    tokenizer = byte_tokenizer()
    max_len = 10
    is_running = True
    lost = asyncio.Event()

    async def start(self):
        pass

    async def stats(self):
        return await asyncio.to_thread(threading.Event().wait)  # for ever

    close = start

lifetime.END_S = 0.5
lifetime.serve_forever(Engine(), ServerSettings(("tiny",)), lifetime.bind("127.0.0.1", 0), 0.1)
"""


def test_a_signal_ends_a_server_whose_threads_never_end(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = server.stderr.readline().rpartition(" ")[2].strip()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/ready", timeout=0.1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 1


def test_a_server_whose_engine_is_lost_stops(model: TinyModel) -> None:
    async def scenario() -> None:
        engine = TinyEngine(model)
        async with serving(engine) as live:
            watch = asyncio.create_task(live.server.stop_if_lost())
            engine.lost.set()
            await asyncio.wait_for(live.ended, LIMIT_S)
            await watch

    run(scenario())


def test_a_port_in_use_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "nothing", "--port", str(port)]) == 2
    why = (
        f"cannot listen on 127.0.0.1, port {port}: Address already in use; --port 0 picks a free "
        "port"
    )
    assert capfd.readouterr().err == f"shardwise: {why}\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "cannot listen on 127.0.0.1, port 70000"),
        (["--host", "no host"], "cannot listen on no host"),
        (["--max-body-bytes", "1000"], "1 MiB"),
        (["--api-key", ""], "an API key must be"),
        (["--api-key-file", "/dev/null"], "/dev/null has no API key"),
        (["--api-key-file", "no-such-file"], "no-such-file: No such file"),
        (["--header-timeout", "0"], "a number of seconds above 0"),
        (["--max-connections", "0"], "at least 1"),
        (["--api-kay", "a"], "did you mean --api-key?"),
        (["--tensor-parallel-size", "2"], "did you mean --tp?"),
        (["--max-model-len=64"], "did you mean --max-len?"),
        (["--gpu-memory-utilization", "0.9"], "did you mean --memory-share?"),
        (["--block-size", "32"], "serve does not take --block-size; see `shardwise serve --help`"),
    ],
)
def test_flags_that_cannot_work(
    flags: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nothing", *flags]) == 2
    assert says in capfd.readouterr().err


def test_keys_come_from_the_command_line_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \none\n")
    monkeypatch.setenv("SHARDWISE_API_KEY", "three")
    args = parse(["serve", "m", "--api-key", "zero", "--api-key-file", str(file)])
    assert api_keys(args) == ("zero", "one", "two", "three")
    monkeypatch.delenv("SHARDWISE_API_KEY")
    assert api_keys(parse(["serve", "m"])) == ()
    monkeypatch.setenv("SHARDWISE_API_KEY", "")
    assert main(["serve", "nothing"]) == 2
    assert "SHARDWISE_API_KEY is empty" in capfd.readouterr().err
