"""What a user asks of a generation."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a generation ends; names, ranges and defaults are OpenAI's and vLLM's.

    temperature: 0 always takes the most probable token; otherwise logits are divided by it (1 leaves them alone).
    top_k: choose among the k most probable tokens; 0 or -1 means all.
    top_p: choose among the fewest most probable tokens that together have at least this probability.
    min_p: choose among tokens at least this times as probable as the most probable one.
    seed: makes the choice repeatable, whatever else is in the batch.
    max_tokens: how many tokens are generated at most.
    stop: texts that end the generation and are not part of it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}, but it must be 0 (greedy) or a positive number.")
        if self.top_k < -1 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k is {self.top_k}, but it must be a whole number, 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but it must be above 0 and at most 1 (all tokens).")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, but it must be between 0 (all tokens) and 1.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but it must be a whole number of 64 bits.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, but at least 1 token must be asked for.")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop must be texts that are not empty.")

    @property
    def greedy(self) -> bool:
        """Whether chance has no part in it."""
        return self.temperature == 0
