"""The metrics of the service in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one service. Several services in one process have separate metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("unirl_reward_requests", "HTTP answers", ["route", "status"], registry=r)
        self.items = Counter(
            "unirl_reward_items",
            "Items by outcome: scored, or the kind of the error",
            ["reward", "outcome"],
            registry=r,
        )
        self.repeated = Counter(
            "unirl_reward_repeated", "Items answered by request id, without scoring", ["reward"], registry=r
        )
        self.wait = Histogram("unirl_reward_wait_seconds", "In the queue", ["reward"], buckets=SECONDS, registry=r)
        self.latency = Histogram(
            "unirl_reward_latency_seconds", "From the queue to the score", ["reward"], buckets=SECONDS, registry=r
        )
        self.batch = Histogram("unirl_reward_batch_size", "Items scored at once", ["reward"], buckets=SIZES, registry=r)
        self.busy = Counter(
            "unirl_reward_busy_seconds", "Workers scoring: over replicas x time = utilisation", ["reward"], registry=r
        )
        self.queue = Gauge("unirl_reward_queue_depth", "Items that wait", ["reward"], registry=r)
        self.ready = Gauge("unirl_reward_replicas_ready", "Workers that can score", ["reward"], registry=r)
        self.restarts = Counter("unirl_reward_restarts", "Processes replaced", ["reward", "cause"], registry=r)
        self.pending = Gauge(
            "unirl_reward_pending_bytes", "Bodies being worked on, and their files unpacked", registry=r
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
