"""Which weights the engine samples from in each step."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.distributed.weight_sync.base import SyncReport, WeightSync
from unirl.train.backend.base import TrainBackend
from unirl.types.protocols import State

PUBLISHED = "rollout"
"""The snapshot that an engine samples from when weights are published less often than every step."""


@dataclass
class Publisher:
    """Brings the weights that a step samples from to the engine. Nothing moves when the engine shares them.

    Weights that are published less often than every step are the snapshot `rollout`. A checkpoint holds it, so a
    resumed run samples from the same weights.
    """

    sync: WeightSync
    backend: TrainBackend
    interval: int
    """Steps between two publications."""
    weights: str
    """What the loss samples from: `live`, or the name of a snapshot."""
    version: int = 0
    """Optimizer updates behind the snapshot `rollout`."""

    def __post_init__(self) -> None:
        if self.interval > 1:
            self.backend.snapshot(PUBLISHED)

    def publish(self, step: int, version: int) -> SyncReport:
        """Bring the weights of `step` to the engine.

        Args:
            version: optimizer updates behind the live weights.
        """
        if self.interval == 1:
            return self.sync.push(version, self.weights)
        if step % self.interval == 0:
            self.backend.snapshot(PUBLISHED)
            self.version = version
        return self.sync.push(self.version, PUBLISHED)

    def state_dict(self) -> State:
        """The version of the snapshot."""
        return {"version": self.version}

    def load_state_dict(self, state: State) -> None:
        """Continue with the version that `state_dict` returned."""
        self.version = state["version"]
