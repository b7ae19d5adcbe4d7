"""What the server sees of the engine, which lives in a process of its own. Imports no torch, and so
neither does the server."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.config import ModelConfig
from shardwise.formats.tokenizers.tokenizer import Tokenizer
from shardwise.serve.engine.scheduler import QueueFull
from shardwise.serve.request import Ask, Piece

__all__ = ["Engine", "EngineDied", "QueueFull", "Ready", "Stats"]


class EngineDied(Exception):
    """The engine's process has ended; the sentence says why."""


@dataclass(frozen=True)
class Stats:
    """Counters of the engine: requests and pages as they are now, the rest since it started."""

    num_waiting: int = 0
    num_running: int = 0
    num_preemptions: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Ready:
    """What the server needs to know of an engine that has started."""

    max_len: int
    num_pages: int
    page_tokens: int


class Engine(Protocol):
    """One model that answers many requests at once. `max_len` is the most tokens of prompt and
    answer together."""

    tokenizer: Tokenizer
    config: ModelConfig
    max_len: int
    vocab_size: int
    is_lost: bool
    """It has ended, and is not started again."""

    def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """The answers piece by piece; closing the generator aborts the request at once.

        Raises at the first step ValueError (can never be served), QueueFull or EngineDied.
        """
        ...

    async def embed(self, tokens: Sequence[int]) -> list[float]:
        """The last hidden state, averaged over the tokens, of length 1."""
        ...

    async def stats(self) -> Stats: ...

    async def close(self) -> None:
        """Let no new request in, end those that are there, then the process."""
        ...
