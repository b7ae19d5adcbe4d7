"""The application: its routes. `lifetime.py` starts and stops the server around it.

A request passes the middleware (id, API key, size), is validated against its body's type
(`requests.py`), becomes one or more requests of the engine, and returns whole or as a stream of
events. All of it ends when the client disconnects.
"""

import array
import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from shardwise.formats.tokenizers.tokenizer import SPECIAL_NAMES
from shardwise.serve.api.chat import chat_request, complete_chat, stream_chat
from shardwise.serve.api.completions import complete, completion_requests, stream_completion
from shardwise.serve.api.errors import ApiError, to_api_error
from shardwise.serve.api.log import log_throughput
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.middleware import Admission, RequestMiddleware
from shardwise.serve.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from shardwise.serve.api.responses import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    Embedding,
    Embeddings,
    EmbeddingUsage,
    ErrorResponse,
    Model,
    Models,
    TokenizeResponse,
    TokenizerInfo,
)
from shardwise.serve.api.service import Service, isolate
from shardwise.serve.api.streaming import EventStream, cancel_and_wait, while_connected
from shardwise.serve.engine_client import EngineClient, EngineDied, QueueFull
from shardwise.serve.request import check_ids
from shardwise.serve.settings import ServerSettings
from shardwise.writing.json_text import json_text

STATS_TIMEOUT_S = 10.0  # the engine replies between steps, which are long for large models
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse},
    "5XX": {"model": ErrorResponse},
}
HANDLED_ERRORS = (
    ApiError, ValueError, QueueFull, EngineDied, HTTPException, RequestValidationError,
)  # fmt: skip


def make_app(engine: EngineClient, settings: ServerSettings) -> FastAPI:
    """Return the application around an engine, which it closes at its end."""
    admission = Admission()
    metrics = Metrics()
    metrics.in_flight.set_function(lambda: admission.num_in_flight)
    service = Service(engine, settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reports = asyncio.ensure_future(log_throughput(engine))
        yield
        reports.cancel()
        service.encoder.close()
        await engine.close()

    docs_url = None if settings.no_docs else "/docs"
    app = FastAPI(title="Shardwise", docs_url=docs_url, redoc_url=None, lifespan=lifespan)
    app.state.admission = admission
    app.state.engine = engine
    app.router.route_class = StrictRoute
    for error_type in HANDLED_ERRORS:
        app.add_exception_handler(error_type, error_handler(metrics))
    add_generation(app, service)
    add_embeddings(app, service)
    add_tokenization(app, service)
    add_status(app, service, admission)
    app.add_middleware(
        RequestMiddleware,
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        admission=admission,
        metrics=metrics,
    )
    if settings.cors_origins:  # outermost: a browser's preflight request has no API key
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
        """Parse strict JSON: UTF-8, without NaN, lone surrogates or unlimited nesting."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """A route whose body is strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def error_handler(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def respond(_: Request, error: Exception) -> Response:
        api_error = to_api_error(error)
        metrics.errors.labels(api_error.code).inc()
        return api_error.response()

    return respond


def add_generation(app: FastAPI, service: Service) -> None:
    def error_event(error: Exception) -> str:
        api_error = to_api_error(error)
        service.metrics.errors.labels(api_error.code).inc()
        return json_text(api_error.body())

    @app.post(
        "/v1/completions", response_model=None, responses={200: {"model": Completion}, **ERRORS}
    )
    async def post_completions(body: CompletionRequest, request: Request) -> Response:
        async def respond() -> Response:
            requests = await completion_requests(service, body)
            requests = [isolate(each, request.state.tenant) for each in requests]
            id = f"cmpl-{request.state.request_id}"
            if body.stream:
                events = stream_completion(service, body, requests, id)
                return await EventStream.start(events, error_event)
            return json_response(await complete(service, body, requests, id))

        return await while_connected(request.receive, respond())

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatCompletion}, **ERRORS},
    )
    async def post_chat_completions(body: ChatRequest, request: Request) -> Response:
        async def respond() -> Response:
            engine_request = await chat_request(service, body)
            engine_request = isolate(engine_request, request.state.tenant)
            id = f"chatcmpl-{request.state.request_id}"
            if body.stream:
                events = stream_chat(service, body, engine_request, id)
                return await EventStream.start(events, error_event)
            return json_response(await complete_chat(service, body, engine_request, id))

        return await while_connected(request.receive, respond())


def add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/embeddings", response_model=None, responses={200: {"model": Embeddings}, **ERRORS}
    )
    async def post_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, embed(service, body)))


async def embed(service: Service, body: EmbeddingRequest) -> Embeddings:
    """Return one vector per input; https://platform.openai.com/docs/api-reference/embeddings"""
    name = service.model_name(body)
    if body.dimensions is not None:
        raise ValueError("dimensions must be left out: vectors have the model's hidden size")
    inputs = await service.embedding_inputs(body)
    tasks = [asyncio.ensure_future(service.engine.embed(tokens)) for tokens in inputs]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)
    in_base64 = body.encoding_format == "base64"
    data = [
        Embedding(index=index, embedding=to_base64(vector) if in_base64 else vector)
        for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, inputs))
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return Embeddings(data=data, model=name, usage=usage)


def to_base64(vector: list[float]) -> str:
    """Encode little-endian fp32."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def add_tokenization(app: FastAPI, service: Service) -> None:
    """Add vLLM's routes between text and token ids."""

    @app.post(
        "/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}, **ERRORS}
    )
    async def post_tokenize(body: TokenizeRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, tokenize(service, body)))

    @app.post(
        "/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}, **ERRORS}
    )
    async def post_detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.model_name(body)
        check_ids("tokens", body.tokens, service.engine.vocab_size)
        text = await while_connected(request.receive, service.encoder.decode(body.tokens))
        return json_response(DetokenizeResponse(prompt=text))

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> TokenizerInfo:
        """Describe the tokenizer; lm-eval probes this route to learn that the server tokenizes."""
        special = {name: service.tokenizer.special.get(name) for name in SPECIAL_NAMES}
        return TokenizerInfo(**special, chat_template=service.tokenizer.chat_template)


async def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    """Return the token ids of a text or of a conversation."""
    service.model_name(body)
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("prompt or messages must be given, and not both")
    if body.prompt is None:
        tokens = await service.chat_tokens(body)
    else:
        tokens = await service.encode(body.prompt, body.add_special_tokens is not False)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.engine.max_len,
        tokens=tokens,
        token_strs=await service.token_texts(tokens) if body.return_token_strs else None,
    )


def add_status(app: FastAPI, service: Service, admission: Admission) -> None:
    created = int(time.time())

    def describe(name: str) -> Model:
        return Model(id=name, created=created, max_model_len=service.engine.max_len)

    @app.get("/v1/models", responses=ERRORS)
    async def list_models() -> Models:
        return Models(data=[describe(name) for name in service.settings.model_names])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def describe_model(name: str) -> Model:
        return describe(service.check_model_name(name))

    @app.get("/health", responses=ERRORS)
    async def health() -> dict[str, str]:
        """Liveness: 200 while the engine runs, also while the server drains."""
        if not service.engine.is_running:
            raise EngineDied("no engine is running; it is started again")
        return {"status": "ok"}

    @app.get("/ready", responses=ERRORS)
    async def ready() -> dict[str, str]:
        """Readiness: 200 if the engine replies and requests are admitted."""
        if admission.is_closed:
            raise ApiError(503, "the server is shutting down", "draining")
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                await service.engine.stats()
        except TimeoutError:
            message = f"the engine has not replied for {STATS_TIMEOUT_S:g} s"
            raise ApiError(503, message, "not_ready") from None
        return {"status": "ok"}

    @app.get("/")
    async def about() -> dict[str, Any]:
        names = list(service.settings.model_names)
        pages = {"api": "/v1", "health": "/health", "metrics": "/metrics"}
        docs = {} if service.settings.no_docs else {"docs": "/docs"}
        return {"name": "Shardwise", "models": names, **pages, **docs}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await service.engine.stats()
        except (EngineDied, TimeoutError):
            stats = None
        return Response(
            service.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def json_response(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
