"""Workloads of `shardwise bench`: how long the sequences of a training step are, and which requests
arrive when at a server. Requests are drawn from a seed, so that every contender gets the same.
Imports no torch.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.setting import setting

Lengths = Literal["fixed", "sharegpt"]
SHAREGPT = ((161.31, 1.2), (337.99, 0.8))
"""Prompts and completions of ShareGPT: mean tokens (Kwon et al. 2023, figure 11), and sigma of a
log-normal distribution with that mean."""
COMMON_IDS = range(256, 8192)
"""Token ids that prompts are drawn from: in every vocabulary in use, and never special."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the work of `shardwise bench train`."""

    length: int = setting(512, "tokens per sequence")
    sequences: int = setting(2, "sequences per data rank and micro-batch")
    steps: int = setting(5, "timed steps, after 2 steps of warm-up")

    def __post_init__(self) -> None:
        for name in ("length", "sequences", "steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class RequestSizes:
    """Lengths of prompts and completions, fixed or drawn.

    Raises ValueError for lengths below 1 and for a share outside 0 to 1.
    """

    prompt_tokens: int = setting(128, "tokens per prompt")
    max_tokens: int = setting(128, "output tokens per request (ignores EOS)")
    lengths: Lengths = setting(
        "fixed",
        "fixed, or drawn with the mean lengths of ShareGPT, 161 prompt and 338 output tokens",
    )
    shared_prefix: float = setting(
        0.0, "share of each prompt that all prompts have in common, from 0 to 1", metavar="SHARE"
    )

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError("a request needs at least 1 prompt token and 1 output token")
        if not 0 <= self.shared_prefix <= 1:
            raise ValueError(f"--shared-prefix must be from 0 to 1, not {self.shared_prefix}")

    def draw(self, rng: random.Random, max_len: int | None) -> tuple[int, int]:
        """Return (prompt tokens, output tokens); drawn ones are together at most `max_len`."""
        if self.lengths == "fixed":
            return self.prompt_tokens, self.max_tokens
        limit = math.inf if max_len is None else max_len // 2
        prompt_tokens, output_tokens = (
            round(max(1, min(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), limit)))
            for mean, sigma in SHAREGPT
        )
        return prompt_tokens, output_tokens


@dataclass(frozen=True)
class LatencyLimits:
    """Latency limits of a request that counts as goodput; None for no limit."""

    ttft_ms: float | None = setting(None, "TTFT limit for goodput", metavar="MS")
    itl_ms: float | None = setting(
        None, "limit for goodput of the mean time between tokens", metavar="MS"
    )

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True)
class Load:
    """Arrival of requests.

    Closed loop: `concurrency` clients, each of which sends its next request when the last is
    complete. Open loop: a Poisson process whose rate goes from `rates[0]` to `rates[1]` requests
    per second, whatever the server does.
    """

    concurrency: int | None = None
    rates: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rates is None)
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.rates is not None and not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"requests per second must be positive, not {self}")

    @property
    def is_ramp(self) -> bool:
        return self.rates is not None and self.rates[0] != self.rates[1]

    def __str__(self) -> str:
        if self.rates is None:
            return f"concurrency {self.concurrency}"
        return "ramp {:g}:{:g}".format(*self.rates) if self.is_ramp else f"rate {self.rates[0]:g}"

    def arrivals_s(self, rng: random.Random, num_requests: int) -> Iterator[float]:
        """Yield the arrival time of each request in seconds; 0 in a closed loop."""
        time_s = 0.0
        for index in range(num_requests):
            yield time_s
            if self.rates is not None:
                time_s += rng.expovariate(self.rate_at(index / max(1, num_requests - 1)))

    def rate_at(self, share: float) -> float:
        """Return the requests per second after this share of the requests."""
        assert self.rates is not None
        first, last = self.rates
        return first + share * (last - first)


@dataclass(frozen=True)
class LoadRequest:
    """One request: its arrival time, its prompt, and the exact number of output tokens."""

    arrival_s: float
    tokens: tuple[int, ...]
    max_tokens: int


def draw_requests(
    load: Load,
    sizes: RequestSizes,
    num_requests: int,
    seed: int,
    vocab_size: int | None = None,
    max_len: int | None = None,
) -> list[LoadRequest]:
    """Draw the requests of a load.

    Each load gets prompts of its own, so that none finds the cached prefixes of an earlier one.
    """
    ids = COMMON_IDS if vocab_size is None or vocab_size >= COMMON_IDS.stop else range(vocab_size)
    rng = random.Random(f"{seed} {load}")
    lengths = [sizes.draw(rng, max_len) for _ in range(num_requests)]
    prefix = rng.choices(ids, k=max((prompt for prompt, _ in lengths), default=0))
    arrivals_s = load.arrivals_s(rng, num_requests)
    requests = []
    for arrival_s, (prompt_tokens, max_tokens) in zip(arrivals_s, lengths, strict=True):
        num_shared = int(sizes.shared_prefix * prompt_tokens)
        prompt = (*prefix[:num_shared], *rng.choices(ids, k=prompt_tokens - num_shared))
        requests.append(LoadRequest(arrival_s, prompt, max_tokens))
    return requests
