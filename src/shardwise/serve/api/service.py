"""The service behind all endpoints: checks of a request, the engine, and measured latencies."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from shardwise.formats.tokenizers.template_process import MAX_PROCESSES
from shardwise.formats.tokenizers.text_bound import text_bound
from shardwise.serve.api.conversation import render_prompt
from shardwise.serve.api.encoder import TextEncoder
from shardwise.serve.api.errors import ApiError
from shardwise.serve.api.known_fields import BaseRequest
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.requests import (
    ChatRequest,
    EmbeddingRequest,
    GenerationRequest,
    TokenizeRequest,
)
from shardwise.serve.api.responses import CachedTokens, Usage
from shardwise.serve.api.streaming import merge
from shardwise.serve.engine_client import EngineClient
from shardwise.serve.request import (
    ContextLengthExceeded,
    Delta,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    check_ids,
    check_length,
)
from shardwise.serve.sampling.detokenize import is_byte_token
from shardwise.serve.settings import ServerSettings

IDS_AT_ONCE = 1024


class Service:
    """The engine as endpoints use it."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.tokenizer = engine.tokenizer
        self.encoder = TextEncoder(engine.tokenizer)
        self.text_bound = text_bound(engine.tokenizer.backend)
        # slow templates hold up other chats and texts only when all of these threads wait
        self._template_threads = ThreadPoolExecutor(MAX_PROCESSES, "chat-template")

    def model_name(self, body: BaseRequest) -> str:
        """Return the model's name in the request, by default the server's first. Raises a 404."""
        if not body.model:
            return self.settings.model_names[0]
        return self.check_model_name(body.model)

    def check_model_name(self, name: str) -> str:
        names = self.settings.model_names
        if name not in names:
            message = f"unknown model {name!r:.200}; this server has {' and '.join(names)}"
            raise ApiError(404, message, "model_not_found", "model")
        return name

    async def prompt_tokens(
        self, prompt: str | list[int], special_tokens: bool, field: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError if it is empty or an id is unknown.

        `field` is the name of the prompt in the request.
        """
        if isinstance(prompt, str):
            tokens = await self.encode(prompt, special_tokens, field)
        else:
            tokens = prompt
        check_ids(field, tokens, self.engine.vocab_size)
        if not tokens:
            raise ValueError(f"{field} is empty; give it at least one token")
        return tokens

    async def encode(self, text: str, special_tokens: bool, field: str = "prompt") -> list[int]:
        """Return the token ids of a text, which is encoded only if it may fit into the context.

        Raises ContextLengthExceeded for one that cannot, with what can.
        """
        bound = self.text_bound
        max_len = self.engine.max_len
        if bound is not None and (fewest := bound.fewest_tokens(text)) > max_len:
            raise ContextLengthExceeded(
                f"{field} has {len(text):,} characters, which are at least {fewest:,} tokens, but "
                f"the limit is {max_len}; a text of {max_len * bound.token_bytes:,} bytes may fit",
                field,
            )
        return await self.encoder.encode(text, special_tokens)

    async def chat_tokens(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        """Return the token ids of a conversation in the model's chat template."""
        text = await asyncio.get_running_loop().run_in_executor(
            self._template_threads, render_prompt, self.tokenizer, body, body.messages or ()
        )
        return await self.prompt_tokens(text, bool(body.add_special_tokens), "messages")

    async def embedding_inputs(self, body: EmbeddingRequest) -> list[list[int]]:
        """Return the token ids of each input. Raises a 400 for one that is too long."""
        special_tokens = body.add_special_tokens is not False
        max_len = self.engine.max_len
        inputs = [
            body.truncated(await self.prompt_tokens(each, special_tokens, "input"), max_len)
            for each in body.input
        ]
        longest = max(map(len, inputs))
        if longest > max_len:
            message = f"an input has {longest} tokens, but the limit is {max_len}; shorten it"
            raise ApiError(400, message, "context_length_exceeded", "input")
        return inputs

    def make_request(
        self,
        tokens: list[int],
        params: SamplingParams,
        body: GenerationRequest,
        starts_text: bool = False,
    ) -> Request:
        """Return the engine's request. Raises ContextLengthExceeded, with what would work."""
        tokens = body.truncated(tokens, self.engine.max_len - (params.max_tokens or 1))
        max_len = self.engine.max_len
        if body.limit_name is None and params.max_tokens is not None:  # the default: what fits
            num_left = max(1, max_len - len(tokens))
            params = replace(params, max_tokens=min(params.max_tokens, num_left))
        check_length(len(tokens), params, max_len, body.limit_name or "max_tokens")
        return Request(
            tuple(tokens),
            params,
            body.priority or 0,
            body.cache_salt or "",
            starts_text=starts_text,
        )

    async def deltas(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (index of the request, delta of one of its completions) as they arrive."""
        start_s = time.perf_counter()
        sources = [self.timed_deltas(request, start_s) for request in requests]
        async with aclosing(merge(sources)) as deltas:
            async for index, delta in deltas:
                yield index, delta
        self.metrics.request_s.observe(time.perf_counter() - start_s)

    async def timed_deltas(self, request: Request, start_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request, observe latencies, and raise if it failed."""
        last_s: dict[int, float] = {}
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                now_s = time.perf_counter()
                if delta.tokens and not last_s:
                    self.metrics.first_token_s.observe(now_s - start_s)
                if delta.tokens:
                    if delta.index in last_s:
                        self.metrics.between_tokens_s.observe(now_s - last_s[delta.index])
                    last_s[delta.index] = now_s
                if delta.finish_reason is not None:
                    self.metrics.completions.labels(delta.finish_reason).inc()
                check_not_failed(delta)
                yield delta

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        if self.tokenizer.is_byte_level:
            return self.tokenizer.token_bytes(id)
        token = self.tokenizer.backend.id_to_token(id) or ""
        if is_byte_token(token):
            return bytes((int(token[3:5], 16),))
        return token.replace("▁", " ").encode()

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of tokens; other requests run in between."""
        texts = []
        for start in range(0, len(ids), IDS_AT_ONCE):
            texts += [self.token_text(id) for id in ids[start : start + IDS_AT_ONCE]]
            await asyncio.sleep(0)
        return texts

    def token_text(self, id: int) -> str:
        """Return the text of a token, or OpenAI's `bytes:\\xe2\\x80` for a part of a character."""
        raw = self.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def isolate(request: Request, tenant: str) -> Request:
    """Return the request with a salt of its tenant added to its own: the time of a first token, and
    `cached_tokens`, would tell other tenants which prompts are in the prefix cache.
    """
    return replace(request, salt=f"{tenant}/{request.salt}") if tenant else request


def check_not_failed(delta: Delta) -> None:
    """Raise a 500 for a request that failed in the model, a 503 for one that was ended early."""
    if delta.finish_reason == "error":
        raise ApiError(
            500, "the model failed on this request; others are not affected", "model_failed"
        )
    if delta.finish_reason == "abort":
        raise ApiError(503, "the server ended this request before it was complete", "aborted")


def count_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the tokens used by the requests of one HTTP request."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(
        len(completion.token_ids) for output in outputs for completion in output.outputs
    )
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=CachedTokens(
            cached_tokens=sum(output.num_cached_tokens for output in outputs)
        ),
    )


def format_prompt_logprobs(
    service: Service, logprobs: Sequence[Logprob]
) -> list[dict[int, dict[str, Any]] | None]:
    """Return log-probabilities of a prompt in vLLM's format; the first token has none."""
    formatted: list[dict[int, dict[str, Any]] | None] = [None]
    for token in logprobs:
        ranks = {id: rank for rank, (id, _) in enumerate(token.top, 1)}
        entries = {**dict(token.top), token.id: token.logprob}
        formatted.append(
            {
                id: {
                    "logprob": logprob,
                    "rank": ranks.get(id),
                    "decoded_token": service.token_text(id),
                }
                for id, logprob in entries.items()
            }
        )
    return formatted
