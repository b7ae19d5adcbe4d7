"""A server under random requests over HTTP: of clients that stay, leave, read slowly, are killed or
ask for nonsense. Memory is to stay flat, pages are to come back, and nobody who stays may get an
answer that is broken."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from soak_clients import Served, Tally, ask, draw

from shardwise.measure.http_client import send_request

CLIENTS = 24
WATCH_S = 1.0
IDLE_S = 20.0
"""How long pages may take to come back after the last request."""
GROWTH_BYTES = 32 << 20
"""What is still flat: allocators settle for a long time."""


@dataclass(frozen=True)
class Soaked:
    """What was asked, by how clients behaved and by status; resident bytes of each process after
    each minute, and how much they grew from the median of the middle third of the time to that of
    the last; and what was left at the end."""

    seconds: float
    behaviours: Mapping[str, int]
    statuses: Mapping[int, int]
    failures: tuple[str, ...]
    num_preemptions: int
    minutes: Mapping[str, tuple[int, ...]]
    growth_bytes: Mapping[str, int]
    pages_used: int
    num_under_way: int
    num_files_left: int
    pages_kept_count: bool

    @property
    def num_requests(self) -> int:
        return sum(self.behaviours.values())

    @property
    def ok(self) -> bool:
        left = self.pages_used or self.num_under_way or self.num_files_left > 0
        return (
            self.pages_kept_count
            and not left
            and not self.failures
            and max(self.growth_bytes.values()) <= GROWTH_BYTES
        )


async def soak(
    served: Served,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    num_requests: int | None = None,
) -> Soaked:
    """Ask for so many seconds, or until there were so many requests."""
    rng = random.Random(seed)
    tally = Tally()
    began_s = time.monotonic()
    num_files = open_files(served)
    before = await figures(served)
    max_len = int(before["max_len"])

    def is_over() -> bool:
        enough = num_requests is not None and tally.num_requests >= num_requests
        return enough or time.monotonic() - began_s > seconds

    async def client(mine: random.Random) -> None:
        while not is_over():
            await ask(served, draw(mine, max_len), tally)

    clients = asyncio.gather(*(client(random.Random(rng.random())) for _ in range(CLIENTS)))
    resident: dict[str, list[int]] = {name: [] for name in served.pids}
    minutes: dict[str, list[int]] = {name: [] for name in served.pids}
    kept = True
    while not is_over():
        await asyncio.sleep(min(WATCH_S, seconds / 30))
        now = await figures(served)
        kept &= total_pages(now) == total_pages(before)
        for name, pid in served.pids.items():
            resident[name].append(resident_bytes(pid))
            if time.monotonic() - began_s >= 60 * (len(minutes[name]) + 1):
                minutes[name].append(resident[name][-1])
        held = ", ".join(f"{name} {values[-1] / 1e6:,.0f} MB" for name, values in resident.items())
        say(f"{tally.num_requests} requests, {held}, {now['used']:.0f} pages used")
    await clients
    after = await idle(served, num_files)
    return Soaked(
        time.monotonic() - began_s,
        dict(tally.behaviours),
        dict(tally.statuses),
        tuple(tally.failures),
        int(after["preemptions"] - before["preemptions"]),
        {name: tuple(values) for name, values in minutes.items()},
        {name: growth(values) for name, values in resident.items()},
        int(after["used"]),
        under_way(after),
        open_files(served) - num_files,
        kept and total_pages(after) == total_pages(before),
    )


# -- what is left of it
# -------------------------------------------------------------------------------------


async def figures(served: Served) -> dict[str, float]:
    """Of /metrics, by the last part of their names; max_len besides."""
    text = await fetch(served, "/metrics")
    found = {
        state: float(value)
        for state, value in re.findall(r'shardwise_kv_pages\{state="(\w+)"\} (\S+)', text)
    }
    for name in ("waiting", "running", "inside"):
        found[name] = float(re.findall(rf"^shardwise_requests_{name} (\S+)", text, re.MULTILINE)[0])
    found["preemptions"] = float(
        re.findall(r"^shardwise_preemptions_total (\S+)", text, re.MULTILINE)[0]
    )
    found["max_len"] = float(
        re.findall(r'"max_model_len":(\d+)', await fetch(served, "/v1/models"))[0]
    )
    return found


async def fetch(served: Served, path: str) -> str:
    async with aclosing(send_request(served.url + path, served.api_key)) as parts:
        return b"".join([part async for part in parts]).decode()


async def idle(served: Served, num_files: int) -> dict[str, float]:
    """The figures once nothing is under way and all connections are closed, or after a while."""
    until = time.monotonic() + IDLE_S
    now = await figures(served)
    while (
        under_way(now) or now["used"] or open_files(served) > num_files
    ) and time.monotonic() < until:
        await asyncio.sleep(0.05)
        now = await figures(served)
    return now


def under_way(now: Mapping[str, float]) -> int:
    return int(now["waiting"] + now["running"] + now["inside"])


def total_pages(now: Mapping[str, float]) -> float:
    return now["free"] + now["used"] + now["cached"]


def growth(values: list[int]) -> int:
    third = len(values) // 3
    return 0 if not third else median(values[2 * third :]) - median(values[third : 2 * third])


def median(numbers: list[int]) -> int:
    return sorted(numbers)[len(numbers) // 2] if numbers else 0


def resident_bytes(pid: int) -> int:
    """VmRSS of a process (proc_pid_status(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def open_files(served: Served) -> int:
    """Of the server: among them a socket for each client."""
    return len(list(Path(f"/proc/{next(iter(served.pids.values()))}/fd").iterdir()))


def children(pid: int) -> list[int]:
    """Processes that one has started, but for the tracker of Python's own."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(each)
        for each in pids
        if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()
    ]
