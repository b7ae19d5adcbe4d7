"""An engine under random requests, of which some leave early: memory is to stay flat, and pages to come back."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from shardwise.serve.link import Engine, QueueFull, Stats
from shardwise.serve.request import Ask, SamplingParams

CLIENTS = 24
STEMS = 4
"""Beginnings that prompts share, so that pages are found and shared."""
LEAVING = 0.3
"""Of the requests, those whose client leaves before the end."""
WATCH_S = 1.0
IDLE_S = 10.0
"""How long pages may take to come back after the last request."""
GROWTH_BYTES = 32 << 20
"""What is still flat: allocators settle for a long time."""


@dataclass(frozen=True)
class Soaked:
    """What was asked, and what the engine's process held: resident bytes, medians of the middle and of the last third
    of the time, and at the end pages in use and requests under way."""

    num_requests: int
    num_left_early: int
    num_refused: int
    num_tokens: int
    num_preemptions: int
    middle_bytes: int
    last_bytes: int
    pages_used: int
    num_under_way: int
    pages_kept_count: bool

    @property
    def growth_bytes(self) -> int:
        return self.last_bytes - self.middle_bytes

    @property
    def ok(self) -> bool:
        return (
            self.growth_bytes <= GROWTH_BYTES
            and not self.pages_used
            and not self.num_under_way
            and self.pages_kept_count
        )


@dataclass
class Tally:
    num_requests: int = 0
    num_left_early: int = 0
    num_refused: int = 0
    num_tokens: int = 0


async def soak(engine: Engine, pid: int, seconds: float, seed: int, say: Callable[[str], None]) -> Soaked:
    """Ask for so many seconds; `pid` is the engine's process."""
    rng, tally = random.Random(seed), Tally()
    ends = time.monotonic() + seconds
    stems = [[rng.randrange(engine.vocab_size) for _ in range(engine.max_len // 4)] for _ in range(STEMS)]
    total = pages_of(await engine.stats())
    clients = [
        asyncio.create_task(client(engine, random.Random(rng.random()), stems, ends, tally)) for _ in range(CLIENTS)
    ]
    resident: list[int] = []
    kept = True
    while time.monotonic() < ends:
        await asyncio.sleep(min(WATCH_S, seconds / 30))
        stats = await engine.stats()
        kept &= pages_of(stats) == total
        resident.append(resident_bytes(pid))
        say(f"{tally.num_requests} requests, {resident[-1] / 1e6:,.0f} MB resident, {stats}")
    await asyncio.gather(*clients)
    stats = await idle(engine)
    third = len(resident) // 3
    return Soaked(
        tally.num_requests, tally.num_left_early, tally.num_refused, tally.num_tokens, stats.num_preemptions,
        median(resident[third : 2 * third]), median(resident[2 * third :]), stats.pages_used,
        stats.num_running + stats.num_waiting, kept and pages_of(stats) == total,
    )  # fmt: skip


async def client(engine: Engine, rng: random.Random, stems: list[list[int]], ends: float, tally: Tally) -> None:
    """One request after the other."""
    while time.monotonic() < ends:
        leaves_after = rng.randrange(1, 20) if rng.random() < LEAVING else None
        tally.num_requests += 1
        num_pieces = 0
        try:
            async with aclosing(engine.generate(drawn(engine, rng, stems))) as pieces:
                async for piece in pieces:
                    tally.num_tokens += len(piece.tokens)
                    num_pieces += 1
                    if num_pieces == leaves_after:
                        tally.num_left_early += 1
                        break
        except QueueFull:
            tally.num_refused += 1
            await asyncio.sleep(0.1)


def drawn(engine: Engine, rng: random.Random, stems: list[list[int]]) -> Ask:
    """A prompt with a beginning that others have too, and anything that can be asked for."""
    prompt = rng.choice(stems)[: rng.randrange(1, engine.max_len // 4)]
    prompt = [*prompt, *(rng.randrange(engine.vocab_size) for _ in range(rng.randrange(engine.max_len // 8)))]
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)), top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 40)),
        repetition_penalty=rng.choice((1.0, 1.1)), max_tokens=rng.randrange(1, engine.max_len // 8),
        n=rng.choice((1, 1, 1, 2, 3)), logprobs=rng.choice((None, None, 3)), ignore_eos=rng.random() < 0.5,
        prompt_logprobs=0 if rng.random() < 0.05 else None, seed=rng.randrange(1 << 30),
    )  # fmt: skip
    return Ask(tuple(prompt), params, rng.choice((0, 0, 1)), rng.choice(("", "", "tenant")))


async def idle(engine: Engine) -> Stats:
    """The counters once nothing is under way, or after a while."""
    stats, until = await engine.stats(), time.monotonic() + IDLE_S
    while (stats.num_running or stats.num_waiting or stats.pages_used) and time.monotonic() < until:
        await asyncio.sleep(0.05)
        stats = await engine.stats()
    return stats


def pages_of(stats: Stats) -> int:
    return stats.pages_free + stats.pages_used + stats.pages_cached


def median(numbers: list[int]) -> int:
    return sorted(numbers)[len(numbers) // 2] if numbers else 0


def resident_bytes(pid: int) -> int:
    """VmRSS of a process (proc_pid_status(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
