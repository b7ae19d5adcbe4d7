"""Load tests of a server: throughput, time to first token, time between tokens, and errors.

The same load goes to an engine of this package or to any OpenAI-compatible server
(`http_client.py`).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from shardwise.measure.rows import Row
from shardwise.measure.workload import LatencyLimits, Load, LoadRequest, RequestSizes, draw_requests

PERCENTILES = (50, 90, 99)
RAMP_PARTS = 4
TIMEOUT_S = 600.0
"""A request that takes longer counts as an error."""


class Backend(Protocol):
    """A server under test. `vocab_size` and `max_len` are None where it does not report them."""

    vocab_size: int | None
    max_len: int | None

    async def complete(
        self, prompt: Sequence[int], max_tokens: int, on_tokens: Callable[[], None]
    ) -> int:
        """Generate `max_tokens` tokens greedily and return how many arrived.

        Calls `on_tokens` whenever some arrive. Raises RequestFailed for anything that goes wrong.
        """
        ...


class RequestFailed(Exception):
    """A request without a complete answer; the message gives the reason."""


@dataclass
class RequestOutcome:
    """Times of one request, in seconds from the start of the load.

    `start_s` is the arrival time in an open loop, so that a late client counts as latency.
    `tokens_s` are the times at which tokens arrived.
    """

    request: LoadRequest
    start_s: float
    tokens_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.tokens_s)]

    @property
    def mean_gap_s(self) -> float:
        return (self.tokens_s[-1] - self.tokens_s[0]) / max(1, len(self.tokens_s) - 1)

    def meets(self, limits: LatencyLimits) -> bool:
        in_time = limits.ttft_ms is None or self.ttft_s <= limits.ttft_ms / 1000
        return in_time and (limits.itl_ms is None or self.mean_gap_s <= limits.itl_ms / 1000)


async def run_load(
    backend: Backend, load: Load, requests: Sequence[LoadRequest], on_done: Callable[[], None]
) -> list[RequestOutcome]:
    """Send all requests and return their outcomes; `on_done` is called after each."""
    clients = asyncio.Semaphore(load.concurrency or len(requests))
    load_start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - load_start

    async def send(request: LoadRequest) -> RequestOutcome:
        await asyncio.sleep(max(0.0, request.arrival_s - now()))
        async with clients:
            outcome = RequestOutcome(request, request.arrival_s if load.rates else now())
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    outcome.num_tokens = await backend.complete(
                        request.tokens, request.max_tokens, lambda: outcome.tokens_s.append(now())
                    )
                if not outcome.tokens_s:
                    outcome.error = "the completion had no tokens"
            except (RequestFailed, TimeoutError) as error:
                outcome.error = str(error) or f"no completion within {TIMEOUT_S:g} s"
            outcome.end_s = now()
        on_done()
        return outcome

    return list(await asyncio.gather(*(send(request) for request in requests)))


async def measure_load(
    backend: Backend,
    load: Load,
    sizes: RequestSizes,
    num_requests: int,
    seed: int,
    limits: LatencyLimits,
    on_done: Callable[[], None],
) -> tuple[list[Row], list[str]]:
    """Return the rows of a load, after one request of warm-up, and its distinct errors."""

    def draw(count: int, seed: int) -> list[LoadRequest]:
        return draw_requests(load, sizes, count, seed, backend.vocab_size, backend.max_len)

    await run_load(backend, load, draw(1, -1 - seed), lambda: None)
    outcomes = await run_load(backend, load, draw(num_requests, seed), on_done)
    rows = load_rows(outcomes, limits, str(load))
    if load.is_ramp:
        for name, quarter in ramp_quarters(load, outcomes):
            rows += latency_rows(quarter, limits, name)
    return rows, sorted({outcome.error for outcome in outcomes if outcome.error})


def ramp_quarters(
    load: Load, outcomes: Sequence[RequestOutcome]
) -> Iterable[tuple[str, Sequence[RequestOutcome]]]:
    """Yield (name, outcomes) of each quarter of a ramp; the name has the rates of the quarter."""
    last_index = max(1, len(outcomes) - 1)
    for indices in np.array_split(np.arange(len(outcomes)), RAMP_PARTS):
        if len(indices):
            first, last = (load.rate_at(index / last_index) for index in (indices[0], indices[-1]))
            yield f"{load}, {first:.3g} to {last:.3g}", [outcomes[index] for index in indices]


def load_rows(outcomes: Sequence[RequestOutcome], limits: LatencyLimits, case: str) -> list[Row]:
    """Return all rows of a load. Rates are over the time until the last request ended."""
    complete = [each for each in outcomes if each.error is None]
    seconds = max(each.end_s for each in outcomes)
    prompt_tokens = sum(len(each.request.tokens) for each in complete)
    output_tokens = sum(each.num_tokens for each in complete)
    rows = [
        Row("requests_per_s", len(complete) / seconds, "requests/s", case),
        Row("prompt_tokens_per_s", prompt_tokens / seconds, "tokens/s", case),
        Row("output_tokens_per_s", output_tokens / seconds, "tokens/s", case),
    ]
    if limits.is_set:
        goodput = sum(each.meets(limits) for each in complete) / seconds
        rows.append(Row("goodput_requests_per_s", goodput, "requests/s", case))
    rows.append(Row("seconds", seconds, "s", case))
    return rows + latency_rows(outcomes, limits, case)


def latency_rows(outcomes: Sequence[RequestOutcome], limits: LatencyLimits, case: str) -> list[Row]:
    """Return percentiles of TTFT, of the time between tokens and of whole requests, and errors."""
    complete = [each for each in outcomes if each.error is None]
    latencies_s = {
        "ttft": [each.ttft_s for each in complete],
        "itl": [gap for each in complete for gap in each.gaps_s],
        "e2e": [each.tokens_s[-1] - each.start_s for each in complete],
    }
    rows = [
        Row(f"{kind}_p{percent}_s", float(np.percentile(seconds, percent)), "s", case)
        for kind, seconds in latencies_s.items()
        for percent in PERCENTILES
        if seconds
    ]
    if limits.is_set:
        share = sum(each.meets(limits) for each in complete) / len(outcomes)
        rows.append(Row("good_share", share, "", case))
    rows.append(Row("errors", len(outcomes) - len(complete), "requests", case))
    return rows
