"""The log of the server on stderr: a line per request, and the throughput every ten seconds."""

import asyncio
import logging
import sys
from urllib.parse import quote

from shardwise.serve.engine_client import EngineClient, EngineDied, Stats

LOG = logging.getLogger("shardwise.serve")
ACCESS = logging.getLogger("shardwise.serve.access")
INTERVAL_S = 10.0
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes, which are logged only when they fail."""


def configure(level: str, access: bool) -> None:
    """Write the server's log to stderr, from `level` up; `access` adds a line per request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("shardwise: %(message)s"))
    LOG.handlers = [handler]
    LOG.propagate = False
    LOG.setLevel(level.upper())
    ACCESS.disabled = not access


def log_request(method: str, path: str, status: int | None, seconds: float, name: str) -> None:
    """Log one request; `status` is None if its client left before the response."""
    if path in QUIET_PATHS and status == 200:
        return
    result = "client left" if status is None else str(status)
    quoted = quote(path, safe="/~")  # no client writes lines or colors of its own
    ACCESS.info("%s %s %s in %.2f s, request %s", method, quoted, result, seconds, name)


async def log_throughput(engine: EngineClient, interval_s: float = INTERVAL_S) -> None:
    """Log the throughput of each interval in which the engine took a step, forever. A restarted
    engine counts from 0."""
    before = Stats()
    while True:
        await asyncio.sleep(interval_s)
        try:
            now = await engine.stats()
        except EngineDied:
            now = Stats()
        if now.steps > before.steps:
            LOG.info("%s", throughput(before, now, interval_s))
        before = now


def throughput(before: Stats, now: Stats, seconds: float) -> str:
    """Return the rates between two reports of an engine, `seconds` apart."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generated_tokens - before.generated_tokens) / seconds
    pages = now.pages_free + now.pages_used + now.pages_cached
    queried = now.prefix_cache_queried_tokens
    hits = f", prefix cache hits {now.prefix_cache_hit_tokens / queried:.0%}" if queried else ""
    return (
        f"{now.num_running} running, {now.num_waiting} waiting; prompts {prompt:,.0f} tokens/s, "
        f"generation {generated:,.0f} tokens/s; KV cache {now.pages_used / max(1, pages):.0%} in "
        f"use{hits}"
    )
