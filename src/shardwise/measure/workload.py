"""What a benchmark of serving asks for and when, drawn from a seed: every contender gets the same
requests. Imports no torch."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Lengths = Literal["fixed", "sharegpt"]
SHAREGPT = ((161.31, 1.2), (337.99, 0.8))
"""Of prompts and answers: mean tokens (Kwon et al. 2023, figure 11), and the spread of a lognormal
with that mean."""
COMMON_IDS = range(256, 8192)
"""Tokens that prompts are drawn from: of every vocabulary in use, and none of them special."""


@dataclass(frozen=True)
class Sizes:
    """How long prompts and answers are: as said, or, for `sharegpt`, drawn. The first `shared` of
    every prompt, a share from 0 to 1, is the same tokens."""

    prompt_tokens: int = 128
    max_tokens: int = 128
    lengths: Lengths = "fixed"
    shared: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError("a request needs at least 1 prompt token and 1 new one")
        if not 0 <= self.shared <= 1:
            raise ValueError(
                f"the shared part of prompts is a share from 0 to 1, not {self.shared}"
            )

    def draw(self, rng: random.Random, longest: int | None) -> tuple[int, int]:
        """(prompt, answer) in tokens, of which a model takes `longest` together."""
        if self.lengths == "fixed":
            return self.prompt_tokens, self.max_tokens
        most = math.inf if longest is None else longest // 2
        drawn = (
            rng.lognormvariate(math.log(mean) - spread**2 / 2, spread) for mean, spread in SHAREGPT
        )
        prompt, answer = (round(max(1, min(number, most))) for number in drawn)
        return prompt, answer


@dataclass(frozen=True)
class Load:
    """How requests come. Closed loop: `concurrency` clients, of which each asks again once it has
    been answered. Open loop: whatever the server does, as a Poisson process at `rates` requests a
    second, from the first to the last."""

    concurrency: int | None = None
    rates: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rates is None)
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"a load needs at least 1 client, not {self.concurrency}")
        if self.rates is not None and not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"requests a second must be positive, not {self}")

    @property
    def is_ramp(self) -> bool:
        return self.rates is not None and self.rates[0] != self.rates[1]

    def __str__(self) -> str:
        if self.rates is None:
            return f"concurrency {self.concurrency}"
        return "ramp {:g}:{:g}".format(*self.rates) if self.is_ramp else f"rate {self.rates[0]:g}"

    def times(self, rng: random.Random, num_requests: int) -> Iterator[float]:
        """When each request comes, in seconds; at once where clients wait for each other."""
        at = 0.0
        for number in range(num_requests):
            yield at
            if self.rates is not None:
                at += rng.expovariate(self.rate_at(number / max(1, num_requests - 1)))

    def rate_at(self, share: float) -> float:
        """Requests a second after this share of them."""
        assert self.rates is not None
        first, last = self.rates
        return first + share * (last - first)


@dataclass(frozen=True)
class Drawn:
    """One request: when it comes, its prompt, and how many tokens are made, neither more nor
    fewer."""

    at_s: float
    tokens: tuple[int, ...]
    max_tokens: int


def draw_requests(
    load: Load,
    sizes: Sizes,
    num_requests: int,
    seed: int,
    vocab_size: int | None = None,
    longest: int | None = None,
) -> list[Drawn]:
    """The requests of a load. Another load has others of the same kind, so that none finds the
    pages of an earlier."""
    ids = COMMON_IDS if vocab_size is None or vocab_size >= COMMON_IDS.stop else range(vocab_size)
    rng = random.Random(f"{seed} {load}")
    lengths = [sizes.draw(rng, longest) for _ in range(num_requests)]
    common = rng.choices(ids, k=max((prompt for prompt, _ in lengths), default=0))
    drawn = []
    for at_s, (num_prompt, max_tokens) in zip(load.times(rng, num_requests), lengths, strict=True):
        num_shared = int(sizes.shared * num_prompt)
        prompt = (*common[:num_shared], *rng.choices(ids, k=num_prompt - num_shared))
        drawn.append(Drawn(at_s, prompt, max_tokens))
    return drawn
