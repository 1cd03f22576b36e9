"""The contract of weight synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SyncReport:
    """What one synchronisation did."""

    version: int
    """Optimizer updates behind the weights that the engine now samples from."""
    num_bytes: int


class WeightSync(Protocol):
    """Carries weights from a train backend to an engine."""

    def push(self, step: int, version: int) -> SyncReport:
        """Make the engine sample from the backend's weights. Returns after arrival is proven."""
        ...


class NoSync:
    """The engine samples from the trained weights themselves: nothing travels."""

    def push(self, step: int, version: int) -> SyncReport:
        """The version that is in use anyway."""
        return SyncReport(version=version, num_bytes=0)
