"""Prometheus metrics: latencies and outcomes of requests, and the counters of the engine.

https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.serve.engine_client import Stats

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server, in its own registry, so that servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCounters()
        self.registry.register(self.engine)
        self.first_token_s = Histogram(
            "shardwise_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.between_tokens_s = Histogram(
            "shardwise_time_between_tokens_seconds",
            "Time between two tokens of a completion.",
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )
        self.request_s = Histogram(
            "shardwise_request_seconds",
            "Time from the arrival of a request to the end of its completions.",
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "shardwise_requests_in_flight",
            "Requests whose response has not been sent completely.",
            registry=self.registry,
        )
        self.completions = Counter(
            "shardwise_completions",
            "Finished completions by finish reason.",
            ["finish_reason"],
            registry=self.registry,
        )
        self.errors = Counter(
            "shardwise_errors",
            "Requests that were refused or failed.",
            ["kind"],
            registry=self.registry,
        )

    def text(self, stats: Stats | None) -> bytes:
        """Return the exposition format, without the engine's counters if `stats` is None."""
        self.engine.stats = stats
        return generate_latest(self.registry)


class EngineCounters(Collector):
    """The engine's counters, as of `stats`."""

    stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        if (stats := self.stats) is None:
            return
        pages = GaugeMetricFamily("shardwise_kv_pages", "Pages of the KV cache.", labels=["state"])
        for state in ("free", "used", "cached"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        total = stats.pages_free + stats.pages_used + stats.pages_cached
        for name, text, value in (
            ("kv_pages_total", "All pages of the KV cache.", total),
            ("requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("requests_running", "Sequences in the batch.", stats.num_running),
        ):
            yield GaugeMetricFamily(f"shardwise_{name}", text, value)
        for name, text, value in (
            ("preemptions", "Sequences that lost their pages.", stats.num_preemptions),
            ("recomputed_tokens", "Tokens recomputed after a preemption.", stats.recomputed_tokens),
            (
                "prefix_cache_queried_tokens",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queried_tokens,
            ),
            (
                "prefix_cache_hit_tokens",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_cache_hit_tokens,
            ),
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("generated_tokens", "Generated tokens.", stats.generated_tokens),
            ("steps", "Steps of the engine.", stats.steps),
            ("request_failures", "Requests that failed in the forward pass.", stats.failures),
        ):
            yield CounterMetricFamily(f"shardwise_{name}", text, value)
