"""What `/metrics` tells Prometheus: times and outcomes as the server sees them, the engine's own
counters beside them.

https://prometheus.io/docs/practices/naming/
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.serve.engine_client import Stats

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


class Metrics:
    """One server's figures, in a registry of their own, so that two servers in one process do not
    mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCounters()
        self.registry.register(self.engine)
        self.first_token_s = Histogram(
            "shardwise_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_S,
            registry=self.registry,
        )
        self.between_tokens_s = Histogram(
            "shardwise_time_between_tokens_seconds",
            "Between two tokens of one answer.",
            buckets=BETWEEN_TOKENS_S,
            registry=self.registry,
        )
        self.request_s = Histogram(
            "shardwise_request_seconds",
            "From a request's arrival to the end of its answers.",
            buckets=REQUEST_S,
            registry=self.registry,
        )
        self.inside = Gauge(
            "shardwise_requests_inside",
            "Requests whose answer has not gone out, or not whole.",
            registry=self.registry,
        )
        self.finished = Counter(
            "shardwise_completions",
            "Completions that have ended, by finish reason.",
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
        """The exposition format; without the engine's part where it does not answer any more
        (`stats` None)."""
        self.engine.stats = stats
        return generate_latest(self.registry)


class EngineCounters(Collector):
    """The engine's counters as of its last answer."""

    stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        if (stats := self.stats) is None:
            return
        pages = GaugeMetricFamily("shardwise_kv_pages", "Pages of the KV cache.", labels=["state"])
        for state in ("free", "used", "cached"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        total = stats.pages_free + stats.pages_used + stats.pages_cached
        for name, says, value in (
            ("kv_pages_total", "All pages of the KV cache.", total),
            ("requests_waiting", "Requests that wait for their first step.", stats.num_waiting),
            ("requests_running", "Requests in the batch.", stats.num_running),
        ):
            yield GaugeMetricFamily(f"shardwise_{name}", says, value)
        for name, says, value in (
            (
                "preemptions",
                "Requests that lost their pages and were computed again.",
                stats.num_preemptions,
            ),
            (
                "recomputed_tokens",
                "Tokens computed again because of preemptions.",
                stats.recomputed_tokens,
            ),
            (
                "prefix_cache_queried_tokens",
                "Prompt tokens that were looked up in the prefix cache.",
                stats.prefix_cache_queried_tokens,
            ),
            (
                "prefix_cache_hit_tokens",
                "Prompt tokens that were found in the prefix cache.",
                stats.prefix_cache_hit_tokens,
            ),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("steps", "Steps of the engine.", stats.steps),
            ("request_failures", "Requests that failed inside the model.", stats.failures),
        ):
            yield CounterMetricFamily(f"shardwise_{name}", says, value)
