"""The engine as the server sees it. Imports no torch, and so neither does the server: the engine
lives in a process of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.engine.scheduler import QueueFull
from shardwise.serve.request import Delta, Request

__all__ = ["EngineClient", "EngineDied", "QueueFull", "Ready", "Stats"]


class EngineDied(Exception):
    """The engine's process has ended; the message says why."""


@dataclass(frozen=True)
class Stats:
    """Counters of the engine: sequences and pages now, the rest since it started.

    Attributes:
        num_waiting: Sequences in the queue.
        num_running: Sequences in the batch.
        num_preemptions: Sequences that lost their pages.
        recomputed_tokens: Tokens computed again because of that.
        prefix_cache_queried_tokens: Prompt tokens that were looked up in the prefix cache.
        prefix_cache_hit_tokens: Those of them that were found.
        pages_free: Pages that hold nothing.
        pages_used: Pages of running sequences.
        pages_cached: Pages that only the prefix cache holds.
        prompt_tokens: Tokens of all prompts.
        generated_tokens: Tokens generated.
        steps: Steps of the engine.
        failures: Requests that failed in the forward pass.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Ready:
    """Report of an engine that has started.

    Attributes:
        max_len: The most tokens per request.
        num_pages, page_tokens: The KV cache.
        weights: How the weights are held, in words.
        kernels: The kernels, in words.
    """

    max_len: int
    num_pages: int
    page_tokens: int
    weights: str
    kernels: str

    def __str__(self) -> str:
        num_requests = self.num_pages * self.page_tokens // self.max_len
        plural = "s" * (num_requests != 1)
        room = f"room for {num_requests:,} request{plural} of {self.max_len:,} tokens"
        return f"{self.weights}, {self.kernels}, {room}"


class EngineClient(Protocol):
    """One model that serves many requests at once.

    Attributes:
        max_len: The most tokens that prompt and completion may have together.
        is_running: The engine's process exists and is ready; not so while it is restarted.
        lost: Set once the engine has ended and is not restarted.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    max_len: int
    vocab_size: int
    lost: asyncio.Event

    @property
    def is_running(self) -> bool: ...

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all n completions; closing the generator aborts the request.

        Assigns the request its id. Raises at the first step ValueError (can never be served),
        QueueFull or EngineDied.
        """
        ...

    async def embed(self, tokens: Sequence[int]) -> list[float]:
        """Return the mean of the last hidden states, scaled to length 1."""
        ...

    async def stats(self) -> Stats: ...

    async def close(self) -> None:
        """Refuse new requests, end those that run, then end the process."""
        ...
