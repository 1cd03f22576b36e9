"""The blocks of a recipe about what a run shows: `tracking` with its services, and `profile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from unirl.config.evaluation import NonNegative, Positive


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
class TrackingConfig:
    """Tracking services that get the metrics as well, and how many samples are kept."""

    mirrors: tuple[Literal["wandb", "tensorboard", "swanlab", "trackio", "mlflow"], ...] = ()
    """Services that also get the metrics of the run directory."""
    entity: str | None = None
    """The W&B team or user."""
    offline: bool = False
    """Services write to local files and never use the network."""
    sample_steps: NonNegative = 10
    """Keep samples every this many steps and after the last step; 0 = never."""
    max_samples: Positive = 16
    """Samples that are kept each time."""
    keep_samples: NonNegative = 0
    """Sample folders, and evaluation folders beside the first one, that remain: the newest ones; 0 = all. Tables keep
    every step."""
    save_rollouts: NonNegative = 0
    """Every this many steps, keep all rows of the step (latents, tokens, log-probs, conditions, advantages) as
    rollouts/step-*.safetensors in the run directory; 0 = never. `unirl replay --train` trains on them."""
    prometheus: PrometheusConfig | None = None
    """Absent = no server of metrics."""
    opentelemetry: OpenTelemetryConfig | None = None
    """Absent = no traces."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiles steps with torch's profiler (`docs/live.md`). Such steps are slower; their results are the same."""

    steps: tuple[Positive, ...]
    """Numbers of the steps, from 1. The first step of a process also has what happens only once."""
    operations: Positive = 15
    """Operations of each phase in the table."""
