"""The blocks of a recipe about watching a run while it goes on: services of `tracking`, and `profile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """Serves the newest metrics of the run at `http://127.0.0.1:PORT/metrics`, for Prometheus (`docs/live.md`).

    Only processes on the machine of the driver can reach it. The banner and `prometheus.json` have the address.
    """

    port: Annotated[int, Meta(ge=0), Meta(le=65535)] = 0
    """Port of the server; 0 = one that is free."""


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryConfig:
    """Sends a trace of each step to a collector of OpenTelemetry, by OTLP over HTTP (`docs/live.md`).

    Headers, such as those with a token, are read from the variable OTEL_EXPORTER_OTLP_HEADERS.
    """

    endpoint: str = "http://127.0.0.1:4318"
    """Address of the collector."""

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, got {self.endpoint!r}")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiles steps with torch's profiler (`docs/live.md`). Such steps are slower; their results are the same."""

    steps: tuple[Annotated[int, Meta(ge=1)], ...]
    """Numbers of the steps, from 1. The first step of a process also has what happens only once."""
    operations: Annotated[int, Meta(ge=1)] = 15
    """Operations of each phase in the table."""
