"""The HTTP server: which path leads where, and how it starts and stops.

A request passes the guard (id, key, size), is checked against its form in `protocol`, becomes one
or more `Request`s of the engine, and returns whole or as a stream of events. All of it ends at once
when its client leaves.
"""

import array
import asyncio
import base64
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from shardwise.formats.tokenizers.tokenizer import SPECIAL_NAMES
from shardwise.serve.api import chat, completions
from shardwise.serve.api.errors import Refused, as_refused
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.middleware import Gate, Guard
from shardwise.serve.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from shardwise.serve.api.responses import (
    Chat,
    Completion,
    Embedding,
    Embeddings,
    EmbeddingUsage,
    ErrorAnswer,
    Model,
    Models,
    Prompt,
    TokenizerInfo,
    Tokens,
)
from shardwise.serve.api.service import Service
from shardwise.serve.api.streaming import EventStream, end, while_connected
from shardwise.serve.engine_client import EngineClient, EngineDied, QueueFull
from shardwise.serve.request import check_ids
from shardwise.serve.settings import ServerSettings

READY_S = 10.0  # an engine answers between two steps, and a step of a large model takes its time
KEEP_ALIVE_S = (
    75  # longer than clients keep idle connections, so that none is closed under a new request
)
DRAIN_S = 15.0
CUT_OFF_S = 1.0  # for those who are cut off to read that they are
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer},
    "5XX": {"model": ErrorAnswer},
}


def make_app(engine: EngineClient, settings: ServerSettings) -> FastAPI:
    """The application around an engine, which is closed when the application ends."""
    gate = Gate()
    metrics = Metrics()
    metrics.inside.set_function(lambda: gate.num_inside)
    service = Service(engine, settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="Shardwise", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.gate = gate
    app.state.engine = engine
    app.router.route_class = StrictRoute
    for kind in (Refused, ValueError, QueueFull, EngineDied, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, error_handler(metrics))
    add_generation(app, service)
    add_embeddings(app, service)
    add_tokens(app, service)
    add_state(app, service, gate)
    app.add_middleware(
        Guard,
        keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
        gate=gate,
        metrics=metrics,
    )
    if settings.cors_origins:  # around the guard: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class StrictRequest(Request):
    async def json(self) -> Any:
        """JSON as its standard has it: UTF-8 without NaN, lone surrogates, or nesting without
        end."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def error_handler(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer_error(_: Request, error: Exception) -> Response:
        refused = as_refused(error)
        metrics.errors.labels(refused.code).inc()
        return refused.response()

    return answer_error


def add_generation(app: FastAPI, service: Service) -> None:
    def as_event(error: Exception) -> str:
        refused = as_refused(error)
        service.metrics.errors.labels(refused.code).inc()
        return json.dumps(refused.body())

    @app.post(
        "/v1/completions", response_model=None, responses={200: {"model": Completion}, **ERRORS}
    )
    async def complete(body: CompletionRequest, request: Request) -> Response:
        async def answer() -> Response:
            requests = await completions.completion_requests(service, body)
            id = f"cmpl-{request.state.request_id}"
            if body.stream:
                events = completions.stream_completion(service, body, requests, id)
                return await EventStream.start(events, as_event)
            return as_json(await completions.complete(service, body, requests, id))

        return await while_connected(request.receive, answer())

    @app.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": Chat}, **ERRORS}
    )
    async def answer_chat(body: ChatRequest, request: Request) -> Response:
        async def answer() -> Response:
            chat_request = await chat.chat_request(service, body)
            id = f"chatcmpl-{request.state.request_id}"
            if body.stream:
                events = chat.stream_chat(service, body, chat_request, id)
                return await EventStream.start(events, as_event)
            return as_json(await chat.chat(service, body, chat_request, id))

        return await while_connected(request.receive, answer())


def add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/embeddings", response_model=None, responses={200: {"model": Embeddings}, **ERRORS}
    )
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        return as_json(await while_connected(request.receive, embeddings(service, body)))


async def embeddings(service: Service, body: EmbeddingRequest) -> Embeddings:
    """A vector an input; https://platform.openai.com/docs/api-reference/embeddings"""
    name = service.model_name(body)
    if body.dimensions is not None:
        raise ValueError("dimensions must be left out: vectors are as long as the model makes them")
    special_tokens = body.add_special_tokens is not False
    prompts = [
        await service.prompt_tokens(prompt, special_tokens, "input") for prompt in body.input
    ]
    for tokens in prompts:
        if len(tokens) > service.engine.max_len:
            says = f"an input has {len(tokens)} tokens, but this server has room for {service.engine.max_len}; shorten it"
            raise Refused(400, says, "context_length_exceeded", "input")
    tasks = [asyncio.ensure_future(service.engine.embed(tokens)) for tokens in prompts]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        await end(tasks)
    in_base64 = body.encoding_format == "base64"
    data = [
        Embedding(index=index, embedding=as_base64(vector) if in_base64 else vector)
        for index, vector in enumerate(vectors)
    ]
    total = sum(map(len, prompts))
    return Embeddings(
        data=data, model=name, usage=EmbeddingUsage(prompt_tokens=total, total_tokens=total)
    )


def as_base64(vector: list[float]) -> str:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def add_tokens(app: FastAPI, service: Service) -> None:
    """vLLM's paths between text and ids."""

    @app.post("/tokenize", response_model=None, responses={200: {"model": Tokens}, **ERRORS})
    async def tokenize(body: TokenizeRequest) -> Response:
        service.model_name(body)
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        if body.prompt is None:
            tokens = await service.chat_tokens(body)
        else:
            tokens = await service.encode(body.prompt, body.add_special_tokens is not False)
        pieces = (
            await asyncio.to_thread(service.token_texts, tokens) if body.return_token_strs else None
        )
        return as_json(
            Tokens(
                count=len(tokens),
                max_model_len=service.engine.max_len,
                tokens=tokens,
                token_strs=pieces,
            )
        )

    @app.post("/detokenize", response_model=None, responses={200: {"model": Prompt}, **ERRORS})
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.model_name(body)
        check_ids("tokens", body.tokens, service.engine.vocab_size)
        return as_json(
            Prompt(prompt=await asyncio.to_thread(service.tokenizer.decode, body.tokens, False))
        )

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> TokenizerInfo:
        """By this lm-eval finds out that the server cuts texts for it."""
        special = {name: service.tokenizer.special.get(name) for name in SPECIAL_NAMES}
        return TokenizerInfo(**special, chat_template=service.tokenizer.chat_template)


def add_state(app: FastAPI, service: Service, gate: Gate) -> None:
    created = int(time.time())

    def describe(name: str) -> Model:
        return Model(id=name, created=created, max_model_len=service.engine.max_len)

    @app.get("/v1/models", responses=ERRORS)
    async def list_models() -> Models:
        return Models(data=[describe(name) for name in service.settings.model_names])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def describe_model(name: str) -> Model:
        return describe(service.known_name(name))

    @app.get("/health", responses=ERRORS)
    async def health() -> dict[str, str]:
        """The server answers, or will again by itself: also while it drains, and while its engine
        is started again."""
        if service.engine.is_lost:
            raise Refused(
                503, "the engine has ended for good; start the server again", "engine_died"
            )
        return {"status": "ok"}

    @app.get("/ready", responses=ERRORS)
    async def ready() -> dict[str, str]:
        """The engine answers, and requests are taken."""
        if gate.is_shut:
            raise Refused(503, "the server is shutting down", "draining")
        try:
            async with asyncio.timeout(READY_S):
                await service.engine.stats()
        except TimeoutError:
            raise Refused(
                503, f"the engine has not answered for {READY_S:g} s", "not_ready"
            ) from None
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        try:
            async with asyncio.timeout(READY_S):
                stats = await service.engine.stats()
        except (EngineDied, TimeoutError):
            stats = None
        return Response(
            service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def as_json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def bind(host: str, port: int) -> socket.socket:
    """Take an address, so that a port in use is known before a model is loaded; nobody can connect
    yet."""
    try:
        if not 0 <= port < 2**16:
            raise OSError(f"ports are from 0 to {2**16 - 1}")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {host}, port {port}: {reason}; --port 0 takes any free port"
        ) from None
    return listener


class Starts(EngineClient, Protocol):
    """An engine that is not there yet."""

    async def start(self) -> None: ...


def serve_forever(
    engine: Starts, settings: ServerSettings, listener: socket.socket, drain_s: float = DRAIN_S
) -> int:
    """Start the engine, then answer requests until SIGTERM or SIGINT, then let those inside end.
    How many were cut off after `drain_s`. Raises what the engine's start raises."""

    async def serve() -> int:
        await engine.start()
        server = Server(make_app(engine, settings), drain_s)
        await server.serve(sockets=[listener])
        return server.num_cut_off

    return asyncio.run(serve())


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and that on a signal first answers new requests with 503
    and ends the others.

    (Its own way closes the socket first, and clients of a load balancer see refused connections.)
    """

    def __init__(self, app: FastAPI, drain_s: float = DRAIN_S) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                server_header=False,
            )
        )
        self.gate: Gate = app.state.gate
        self.engine: EngineClient = app.state.engine
        self.drain_s = drain_s
        self.draining: asyncio.Task[None] | None = None
        self.num_cut_off = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            print(
                f"shardwise: ready at http://{f'[{host}]' if ':' in host else host}:{port}",
                file=sys.stderr,
                flush=True,
            )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """End in good order; asked a second time, at once."""
        if self.draining is None:
            self.draining = asyncio.ensure_future(self.drain())
        else:
            self.draining.cancel()

    async def drain(self) -> None:
        if self.gate.num_inside:
            says = f"stopping; the {self.gate.num_inside} requests inside have {self.drain_s:g} s to end"
            print(f"shardwise: {says}", file=sys.stderr, flush=True)
        try:
            await self.gate.drain(self.drain_s)
        finally:
            self.num_cut_off = self.gate.num_inside
            if self.num_cut_off:  # who is still inside is told so by the engine's end
                await self.engine.close()
                await self.gate.drain(CUT_OFF_S)
            self.should_exit = True
