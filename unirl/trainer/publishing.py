"""Which weights the engine samples from in each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.distributed.weight_sync.base import SyncReport, WeightSync
from unirl.train.backend.base import TrainBackend
from unirl.types.protocols import State

PUBLISHED = "rollout"
"""The snapshot that an engine samples from when it does not sample from the live weights of every step."""


@dataclass
class Publisher:
    """Brings the weights that a step samples from to the engine. Nothing moves when the engine shares them.

    The engine gets the live weights; or snapshots, when weights are published less often than every step, or when
    steps are generated ahead. A checkpoint holds the snapshots, so a resumed run samples from the same weights.
    """

    sync: WeightSync
    backend: TrainBackend
    interval: int
    """Steps between two publications."""
    weights: str
    """What the loss samples from: `live`, or the name of a snapshot."""
    ahead: int = 0
    """Steps that are generated before the weights have learned from them; not with an interval above 1."""
    is_free: bool = False
    """Samples come from the live weights of some step before, of which no snapshot is kept."""
    versions: dict[str, int] = field(default_factory=dict)
    """Optimizer updates behind each snapshot."""

    def __post_init__(self) -> None:
        self.versions = dict.fromkeys(self._snapshots(), 0)
        for name in self.versions:
            self.backend.snapshot(name)

    def _snapshots(self) -> list[str]:
        if self.ahead:
            return [f"{PUBLISHED}-{number}" for number in range(self.ahead)]
        return [PUBLISHED] if self.interval > 1 else []

    @property
    def samples_are_live(self) -> bool:
        """The samples of a step come from the weights that it begins to train."""
        return not (self.versions or self.is_free)

    def oldest(self, version: int) -> int:
        """The least number of updates behind weights that samples of the next step may come from.

        Args:
            version: optimizer updates behind the live weights.
        """
        return min(self.versions.values(), default=version)

    def keep(self, step: int, version: int) -> None:
        """Keep the weights at the beginning of `step`, if later steps sample from a snapshot of them.

        Args:
            version: optimizer updates behind the live weights.
        """
        if self.versions and step % self.interval == 0:
            self.backend.snapshot(self._of(step))
            self.versions[self._of(step)] = version

    def push(self, step: int, version: int) -> SyncReport:
        """Bring the weights at the beginning of `step` to the engine, of which `keep` keeps the last `ahead` ones."""
        if not self.versions:
            return self.sync.push(version, self.weights)
        return self.sync.push(self.versions[self._of(step)], self._of(step))

    def _of(self, step: int) -> str:
        """The snapshot of the weights at the beginning of `step`."""
        names = list(self.versions)
        return names[step % len(names)]

    def state_dict(self) -> State:
        """The versions of the snapshots."""
        return {"versions": dict(self.versions)}

    def load_state_dict(self, state: State) -> None:
        """Continue with the versions that `state_dict` returned. Older checkpoints have one, for the only snapshot."""
        self.versions = {
            name: state["versions"][name] if "versions" in state else state["version"] for name in self.versions
        }
