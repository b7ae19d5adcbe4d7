"""What all endpoints need: the engine, behind the checks that a prompt has to pass, and with its
times taken."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.serve.api.errors import Refused
from shardwise.serve.api.metrics import Metrics
from shardwise.serve.api.requests import Body, ChatRequest, Generation, TokenizeRequest
from shardwise.serve.api.responses import CachedTokens, Usage
from shardwise.serve.api.streaming import merge
from shardwise.serve.engine_client import Engine
from shardwise.serve.request import Ask, Logprob, Piece, SamplingParams, check_ids
from shardwise.serve.settings import ServerSettings


@dataclass
class Choice:
    """What one of the n answers to one prompt has come to so far."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stopped_by: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.num_tokens += len(piece.tokens)
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.stopped_by = piece.stopped_by


class Counts:
    """Tokens used by one HTTP request, counted as its pieces come."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.prompt_tokens = sum(len(ask.tokens) for ask in asks)
        self.new_tokens = 0
        self.cached = [0] * len(asks)

    def add(self, number: int, piece: Piece) -> None:
        self.new_tokens += len(piece.tokens)
        self.cached[number] = max(self.cached[number], piece.num_cached_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.new_tokens,
            total_tokens=self.prompt_tokens + self.new_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(self.cached)),
        )


class Service:
    """The engine as endpoints see it."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
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

    def ask(self, tokens: list[int], params: SamplingParams, body: Generation) -> Ask:
        """Raises a 400 that says what fits if prompt and answer are too long."""
        room = self.engine.max_len - len(tokens)
        if body.max_tokens is None and params.max_tokens is not None and room < params.max_tokens:
            params = replace(params, max_tokens=max(room, 1))  # it was our default
        wanted = params.max_tokens or 1
        if wanted > room:
            fits = (
                f"max_tokens of {room} fits"
                if room > 0
                else f"a prompt of {self.engine.max_len - 1} tokens fits"
            )
            raise Refused(
                400,
                f"{len(tokens)} tokens of prompt and {wanted} of answer need {len(tokens) + wanted}, but this "
                f"server has room for {self.engine.max_len} in a request; {fits}",
                "context_length_exceeded",
                "max_tokens" if room > 0 else None,
            )
        return Ask(tuple(tokens), params, body.priority or 0, body.cache_salt or "")

    async def pieces(self, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Piece], None]:
        """(number of the prompt, piece of one of its answers), as they come."""
        began_s = time.perf_counter()
        async with aclosing(merge([self.timed(ask, began_s) for ask in asks])) as pieces:
            async for number, piece in pieces:
                yield number, piece
        self.metrics.request_s.observe(time.perf_counter() - began_s)

    async def timed(self, ask: Ask, began_s: float) -> AsyncGenerator[Piece, None]:
        last_s: dict[int, float] = {}
        async with aclosing(self.engine.generate(ask)) as pieces:
            async for piece in pieces:
                now_s = time.perf_counter()
                if piece.tokens and not last_s:
                    self.metrics.first_token_s.observe(now_s - began_s)
                if piece.tokens:
                    if piece.index in last_s:
                        self.metrics.between_tokens_s.observe(now_s - last_s[piece.index])
                    last_s[piece.index] = now_s
                if piece.finish_reason is not None:
                    self.metrics.finished.labels(piece.finish_reason).inc()
                if piece.finish_reason == "error":
                    raise Refused(
                        500,
                        "the model failed on this request; others are not affected",
                        "model_failed",
                    )
                if piece.finish_reason == "abort":
                    raise Refused(
                        503,
                        "the server ended this request before its answer was complete",
                        "aborted",
                    )
                yield piece

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
