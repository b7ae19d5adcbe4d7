"""What all endpoints need: the engine, behind the checks that a prompt has to pass, and with its
times taken."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from shardwise.serve.api.errors import Refused
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.requests import Body, ChatRequest, Generation, TokenizeRequest
from shardwise.serve.api.responses import CachedTokens, Usage
from shardwise.serve.api.streaming import merge
from shardwise.serve.engine_client import EngineClient
from shardwise.serve.request import (
    Delta,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    check_ids,
    check_length,
)
from shardwise.serve.settings import ServerSettings


class Service:
    """The engine as endpoints see it."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.tokenizer = engine.tokenizer

    def model_name(self, body: Body) -> str:
        """The name under which the request knows the model: the first, if it says none."""
        return self.settings.model_names[0] if body.model is None else self.known_name(body.model)

    def known_name(self, name: str) -> str:
        names = self.settings.model_names
        if name not in names:
            says = f"there is no model {name!r:.200} here, but {' and '.join(names)}"
            raise Refused(404, says, "model_not_found", "model")
        return name

    async def prompt_tokens(
        self, prompt: str | list[int], special_tokens: bool, name: str = "prompt"
    ) -> list[int]:
        """The ids of a prompt to be run, the field `name`: not empty, none outside the
        vocabulary."""
        tokens = await self.encode(prompt, special_tokens) if isinstance(prompt, str) else prompt
        check_ids(name, tokens, self.engine.vocab_size)
        if not tokens:
            raise ValueError(f"{name} is empty; give it at least one token")
        return tokens

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        """On another thread: a long text takes a second, in which other requests go on."""
        return await asyncio.to_thread(self.tokenizer.encode, text, special_tokens)

    async def chat_tokens(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        """The ids of a conversation, in the template of the model."""
        messages = [message.for_template() for message in body.messages or ()]
        text = await asyncio.to_thread(
            self.tokenizer.chat, messages, body.add_generation_prompt is not False
        )
        return await self.prompt_tokens(text, bool(body.add_special_tokens))

    def request(self, tokens: list[int], params: SamplingParams, body: Generation) -> Request:
        """Return the engine's request. Raises ValueError if prompt and completion are too long."""
        if body.max_tokens is None and params.max_tokens is not None:  # our default: what fits
            num_left = self.engine.max_len - len(tokens)
            params = replace(params, max_tokens=max(1, min(params.max_tokens, num_left)))
        check_length(len(tokens), params.max_tokens, self.engine.max_len)
        return Request(tuple(tokens), params, body.priority or 0, body.cache_salt or "")

    async def deltas(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (number of the request, delta of one of its completions), as they come."""
        began_s = time.perf_counter()
        sources = [self.timed(request, began_s) for request in requests]
        async with aclosing(merge(sources)) as deltas:
            async for number, delta in deltas:
                yield number, delta
        self.metrics.request_s.observe(time.perf_counter() - began_s)

    async def timed(self, request: Request, began_s: float) -> AsyncGenerator[Delta, None]:
        last_s: dict[int, float] = {}
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                now_s = time.perf_counter()
                if delta.tokens and not last_s:
                    self.metrics.first_token_s.observe(now_s - began_s)
                if delta.tokens:
                    if delta.index in last_s:
                        self.metrics.between_tokens_s.observe(now_s - last_s[delta.index])
                    last_s[delta.index] = now_s
                if delta.finish_reason is not None:
                    self.metrics.finished.labels(delta.finish_reason).inc()
                if delta.finish_reason == "error":
                    raise Refused(
                        500,
                        "the model failed on this request; others are not affected",
                        "model_failed",
                    )
                if delta.finish_reason == "abort":
                    raise Refused(
                        503,
                        "the server ended this request before its answer was complete",
                        "aborted",
                    )
                yield delta

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        if self.tokenizer.is_byte_level:
            return self.tokenizer.token_bytes(id)
        token = self.tokenizer.backend.id_to_token(id) or ""
        if len(token) == 6 and token.startswith("<0x"):
            return bytes((int(token[3:5], 16),))
        return token.replace("▁", " ").encode()

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.token_text(id) for id in ids]

    def token_text(self, id: int) -> str:
        """A token as log-probabilities name it: its text, or OpenAI's `bytes:\\xe2\\x80` for a part
        of a character."""
        raw = self.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    service: Service, scores: Sequence[Logprob]
) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's form of the prompt's log-probabilities; the first token has none."""
    found: list[dict[int, dict[str, Any]] | None] = [None]
    for score in scores:
        ranks = {id: rank for rank, (id, _) in enumerate(score.top, 1)}
        entries = {**dict(score.top), score.id: score.logprob}
        found.append(
            {
                id: {
                    "logprob": value,
                    "rank": ranks.get(id),
                    "decoded_token": service.token_text(id),
                }
                for id, value in entries.items()
            }
        )
    return found


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the tokens that one HTTP request has used so far."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_new,
        total_tokens=num_prompt + num_new,
        prompt_tokens_details=CachedTokens(cached_tokens=num_cached),
    )
