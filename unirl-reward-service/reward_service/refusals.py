"""What a request is refused for, and the memory that all requests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Gauge


class Refused(ValueError):
    """The request as a whole cannot be answered."""

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.retry_after_s = status, kind, detail, retry_after_s


class Budget:
    """The bytes that all requests together may hold: bodies, and what their files unpack to."""

    def __init__(self, limit_mb: float, gauge: Gauge) -> None:
        self.limit_mb, self._gauge = limit_mb, gauge
        self.used = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one request holds; given back at its end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.add(-share.held)

    def add(self, count: int) -> None:
        self.used += count
        self._gauge.set(self.used)


class Share:
    """The part of one request."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int) -> None:
        """Hold so many bytes more. Raises Refused: 413 too many for one request, 503 too many for now."""
        limit_mb = self._budget.limit_mb
        if self.held + count > limit_mb * 2**20:
            raise Refused(
                413, "too_large", f"the request unpacks to more than {limit_mb:g} MiB: send fewer items at once"
            )
        if self._budget.used + count > limit_mb * 2**20:
            raise Refused(503, "busy", f"{limit_mb:g} MiB of requests are being worked on", 1)
        self.held += count
        self._budget.add(count)
