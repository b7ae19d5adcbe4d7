"""A soak test: a server under random HTTP requests of clients that stay, leave, read slowly, are
killed or send nonsense. Memory must stay flat, pages must return, and responses must be whole."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

from soak_clients import RunningServer, Tally, draw_request, send

from shardwise.measure.http_client import send_request

CLIENTS = 24
SAMPLE_S = 1.0
IDLE_TIMEOUT_S = 20.0
"""Time that pages may take to return after the last request."""
GROWTH_BYTES = 32 << 20
"""Growth of memory that still counts as flat: allocators take long to settle."""


@dataclass(frozen=True)
class SoakResult:
    """The result of a soak test.

    Attributes:
        behaviours: Requests by the behaviour of their client.
        statuses: Responses by status.
        failures: Responses that were wrong.
        minutes: Resident bytes of each process after each minute.
        growth_bytes: Growth of each process, from the median of the middle third of the time to
            that of the last third.
        pages_used, num_in_flight, num_files_left: What was left at the end.
        pages_constant: The number of all pages never changed.
    """

    seconds: float
    behaviours: Mapping[str, int]
    statuses: Mapping[int, int]
    failures: tuple[str, ...]
    num_preemptions: int
    minutes: Mapping[str, tuple[int, ...]]
    growth_bytes: Mapping[str, int]
    pages_used: int
    num_in_flight: int
    num_files_left: int
    pages_constant: bool

    @property
    def num_requests(self) -> int:
        return sum(self.behaviours.values())

    @property
    def ok(self) -> bool:
        has_leak = self.pages_used or self.num_in_flight or self.num_files_left > 0
        is_flat = max(self.growth_bytes.values()) <= GROWTH_BYTES
        return self.pages_constant and not has_leak and not self.failures and is_flat


async def soak(
    server: RunningServer,
    seconds: float,
    seed: int,
    log: Callable[[str], None],
    max_requests: int | None = None,
) -> SoakResult:
    """Send requests for `seconds`, or until there were `max_requests`."""
    rng = random.Random(seed)
    tally = Tally()
    start_s = time.monotonic()
    num_files = count_open_files(server)
    before = await read_metrics(server)
    max_len = int(before["max_len"])

    def is_over() -> bool:
        is_enough = max_requests is not None and tally.num_requests >= max_requests
        return is_enough or time.monotonic() - start_s > seconds

    async def run_client(client_rng: random.Random) -> None:
        while not is_over():
            await send(server, draw_request(client_rng, max_len), tally)

    clients = asyncio.gather(*(run_client(random.Random(rng.random())) for _ in range(CLIENTS)))
    resident: dict[str, list[int]] = {name: [] for name in server.pids}
    minutes: dict[str, list[int]] = {name: [] for name in server.pids}
    pages_constant = True
    while not is_over():
        await asyncio.sleep(min(SAMPLE_S, seconds / 30))
        now = await read_metrics(server)
        pages_constant &= total_pages(now) == total_pages(before)
        for name, pid in server.pids.items():
            resident[name].append(resident_bytes(pid))
            if time.monotonic() - start_s >= 60 * (len(minutes[name]) + 1):
                minutes[name].append(resident[name][-1])
        sizes = ", ".join(f"{name} {values[-1] / 1e6:,.0f} MB" for name, values in resident.items())
        log(f"{tally.num_requests} requests, {sizes}, {now['used']:.0f} pages used")
    await clients
    after = await wait_until_idle(server, num_files)
    return SoakResult(
        time.monotonic() - start_s,
        dict(tally.behaviours),
        dict(tally.statuses),
        tuple(tally.failures),
        int(after["preemptions"] - before["preemptions"]),
        {name: tuple(values) for name, values in minutes.items()},
        {name: growth(values) for name, values in resident.items()},
        int(after["used"]),
        num_in_flight(after),
        count_open_files(server) - num_files,
        pages_constant and total_pages(after) == total_pages(before),
    )


# -- state of the server


async def read_metrics(server: RunningServer) -> dict[str, float]:
    """Return metrics by the last part of their names, and `max_len`."""
    text = await fetch(server, "/metrics")
    pages = re.findall(r'shardwise_kv_pages\{state="(\w+)"\} (\S+)', text)
    metrics = {state: float(value) for state, value in pages}
    for name in ("requests_waiting", "requests_running", "requests_in_flight", "preemptions_total"):
        (value,) = re.findall(rf"^shardwise_{name} (\S+)", text, re.MULTILINE)
        metrics[name.removeprefix("requests_").removesuffix("_total")] = float(value)
    (max_len, *_) = re.findall(r'"max_model_len":(\d+)', await fetch(server, "/v1/models"))
    return metrics | {"max_len": float(max_len)}


async def fetch(server: RunningServer, path: str) -> str:
    async with aclosing(send_request(server.url + path, server.api_key)) as chunks:
        return b"".join([chunk async for chunk in chunks]).decode()


async def wait_until_idle(server: RunningServer, num_files: int) -> dict[str, float]:
    """Return the metrics once nothing runs and all connections are closed, or after a timeout."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    now = await read_metrics(server)

    def is_busy() -> bool:
        return bool(num_in_flight(now) or now["used"] or count_open_files(server) > num_files)

    while is_busy() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        now = await read_metrics(server)
    return now


def num_in_flight(metrics: Mapping[str, float]) -> int:
    return int(metrics["waiting"] + metrics["running"] + metrics["in_flight"])


def total_pages(metrics: Mapping[str, float]) -> float:
    return metrics["free"] + metrics["used"] + metrics["cached"]


def growth(values: Sequence[int]) -> int:
    """Return the median of the last third minus that of the middle third; 0 for too few values."""
    third = len(values) // 3
    if not third:
        return 0
    return median_high(values[2 * third :]) - median_high(values[third : 2 * third])


def resident_bytes(pid: int) -> int:
    """Return VmRSS of a process (proc_pid_status(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def count_open_files(server: RunningServer) -> int:
    """Count open files of the server's first process, among them one socket per client, without the
    two pipes to each process that renders chat templates and waits for more."""
    pid = next(iter(server.pids.values()))
    renderers = [child for child in child_pids(pid) if b"chat_template" in command_of(child)]
    return len(list(Path(f"/proc/{pid}/fd").iterdir())) - 2 * len(renderers)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def child_pids(pid: int) -> list[int]:
    """Return the processes that one has started, in any thread, without the resource tracker."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for thread in threads for child in thread.read_text().split()]
    return [child for child in pids if b"resource_tracker" not in command_of(child)]
