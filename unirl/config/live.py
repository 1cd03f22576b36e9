"""The blocks of `tracking` about services that watch a run while it goes on."""

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
