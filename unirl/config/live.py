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
