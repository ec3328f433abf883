"""Prometheus metrics that are counted while requests are served. control/metrics.py has the metrics that are
collected on demand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

_OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)

_ENGINE_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self, counted_elsewhere: Collector) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "sf_requests",
            "Requests of agents, by status of the response.",
            ["dialect", "status"],
            registry=registry,
        )
        self.agent_bytes = Counter(
            "sf_agent_bytes",
            "Bytes of request and response bodies of agents.",
            ["direction"],
            registry=registry,
        )
        self.overhead = Histogram(
            "sf_gateway_overhead_seconds",
            "Time of a request outside the router: reading, rendering and answering.",
            buckets=_OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.waiting = Histogram(
            "sf_wait_seconds",
            "Time until the first engine received a turn.",
            buckets=_ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.engine = Histogram(
            "sf_engine_seconds",
            "Time from the first engine that received a turn to its end, interruptions included.",
            buckets=_ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "sf_prompt_tokens",
            "Prompt tokens, reused from the record or newly encoded.",
            ["origin"],
            registry=registry,
        )
        registry.register(counted_elsewhere)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)
