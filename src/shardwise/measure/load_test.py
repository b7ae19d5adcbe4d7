"""A server under load: how many tokens a second, how soon the first of an answer, how evenly the
rest.

The same load goes to an engine of our own or to any server that speaks OpenAI's API (`target.py`).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from shardwise.measure.workload import Drawn, Load, Sizes, draw_requests

PERCENTILES = (50, 90, 99)
RAMP_PARTS = 4
LIMIT_S = 600.0
"""A request that takes longer counts as an error."""


class Target(Protocol):
    """What is measured. `vocab_size` and `max_len` are None where it does not tell."""

    vocab_size: int | None
    max_len: int | None

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, heard: Callable[[], None]
    ) -> int:
        """Have `max_tokens` tokens made, greedily; `heard` is called whenever some arrive. Returns
        how many did. What goes wrong is raised as Failed."""
        ...


class Failed(Exception):
    """A request that was not answered; the sentence says why."""


@dataclass
class Outcome:
    """What came of a request. Times are seconds from the start of the load. `began_s` is when it
    was to be sent: where requests come by the clock, being late counts."""

    drawn: Drawn
    began_s: float
    heard_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_tokens: int = 0
    error: str | None = None

    @property
    def first_s(self) -> float:
        return self.heard_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.heard_s)]

    @property
    def mean_gap_s(self) -> float:
        return (self.heard_s[-1] - self.heard_s[0]) / max(1, len(self.heard_s) - 1)


@dataclass(frozen=True)
class Goals:
    """What a good answer is: its first token, and on average each after it, within so many seconds;
    None: any."""

    first_s: float | None = None
    gap_s: float | None = None

    @property
    def wanted(self) -> bool:
        return self.first_s is not None or self.gap_s is not None

    def met(self, outcome: Outcome) -> bool:
        soon = self.first_s is None or outcome.first_s <= self.first_s
        return soon and (self.gap_s is None or outcome.mean_gap_s <= self.gap_s)


@dataclass(frozen=True)
class Row:
    """One figure of one load, or of a part of a ramp."""

    name: str
    value: float
    unit: str
    load: str


async def run_load(
    target: Target, load: Load, drawn: Sequence[Drawn], done: Callable[[], None]
) -> list[Outcome]:
    """Ask all of it; `done` is called after each."""
    clients = asyncio.Semaphore(load.concurrency or len(drawn))
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    async def ask(each: Drawn) -> Outcome:
        await asyncio.sleep(max(0.0, each.at_s - now()))
        async with clients:
            outcome = Outcome(each, each.at_s if load.rates else now())
            try:
                async with asyncio.timeout(LIMIT_S):
                    outcome.num_tokens = await target.answer(
                        each.tokens, each.max_tokens, lambda: outcome.heard_s.append(now())
                    )
                if not outcome.heard_s:
                    outcome.error = "the answer had no tokens"
            except (Failed, TimeoutError) as error:
                outcome.error = str(error) or f"no answer within {LIMIT_S:g} s"
            outcome.ended_s = now()
        done()
        return outcome

    return list(await asyncio.gather(*(ask(each) for each in drawn)))


async def measure(
    target: Target,
    load: Load,
    sizes: Sizes,
    num_requests: int,
    seed: int,
    goals: Goals,
    done: Callable[[], None],
) -> tuple[list[Row], list[str]]:
    """The figures of a load, after a request of warm-up that does not count; and what went wrong,
    each once."""
    about = target.vocab_size, target.max_len
    await run_load(target, load, draw_requests(load, sizes, 1, -1 - seed, *about), lambda: None)
    outcomes = await run_load(
        target, load, draw_requests(load, sizes, num_requests, seed, *about), done
    )
    rows = figures(outcomes, goals, str(load))
    if load.is_ramp:
        for part, mine in parts_of(load, outcomes):
            rows += latencies(mine, goals, part)
    return rows, sorted({outcome.error for outcome in outcomes if outcome.error})


def parts_of(load: Load, outcomes: Sequence[Outcome]) -> Iterable[tuple[str, Sequence[Outcome]]]:
    """A ramp from its slow beginning to its end, each part by the rates in it."""
    for cut in np.array_split(np.arange(len(outcomes)), RAMP_PARTS):
        if len(cut):
            first, last = (load.rate_at(at / max(1, len(outcomes) - 1)) for at in (cut[0], cut[-1]))
            yield f"{load}, {first:.3g} to {last:.3g}", [outcomes[at] for at in cut]


def figures(outcomes: Sequence[Outcome], goals: Goals, load: str) -> list[Row]:
    """Rates are over the time from the first request to the end of the last answer."""
    good = [each for each in outcomes if each.error is None]
    seconds = max(each.ended_s for each in outcomes)
    named = [
        ("requests_per_s", len(good) / seconds, "requests/s"),
        ("prompt_tokens_per_s", sum(len(each.drawn.tokens) for each in good) / seconds, "tokens/s"),
        ("output_tokens_per_s", sum(each.num_tokens for each in good) / seconds, "tokens/s"),
    ]
    if goals.wanted:
        named.append(("goodput_requests_per_s", sum(map(goals.met, good)) / seconds, "requests/s"))
    named.append(("seconds", seconds, "s"))
    return [Row(name, value, unit, load) for name, value, unit in named] + latencies(
        outcomes, goals, load
    )


def latencies(outcomes: Sequence[Outcome], goals: Goals, load: str) -> list[Row]:
    """Time to first token, between tokens, and of the whole answer; and how many failed."""
    good = [each for each in outcomes if each.error is None]
    kinds = {
        "ttft": [each.first_s for each in good],
        "itl": [gap for each in good for gap in each.gaps_s],
        "e2e": [each.heard_s[-1] - each.began_s for each in good],
    }
    rows = [
        Row(f"{kind}_p{percent}_s", float(np.percentile(seconds, percent)), "s", load)
        for kind, seconds in kinds.items()
        for percent in PERCENTILES
        if seconds
    ]
    if goals.wanted:
        rows.append(Row("good_share", sum(map(goals.met, good)) / len(outcomes), "", load))
    rows.append(Row("errors", len(outcomes) - len(good), "requests", load))
    return rows
