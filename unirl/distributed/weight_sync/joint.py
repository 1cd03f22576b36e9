"""Weight synchronisation of two engines that sample the same steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unirl.distributed.weight_sync.base import SyncReport, WeightSync


class Sleeper(Protocol):
    """An engine that sleeps in main memory while nothing is sent to it."""

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


@dataclass(frozen=True)
class JointSync:
    """Brings weights to the engine, and then to a second one, which sleeps before and after."""

    first: WeightSync
    second: WeightSync
    sleeper: Sleeper

    def push(self, version: int, weights: str = "live") -> SyncReport:
        """Make both engines sample from the trainer's weights. Returns the report of the first one."""
        report = self.first.push(version, weights)
        self.sleeper.wake_up()
        try:
            self.second.push(version, weights)
        finally:
            self.sleeper.sleep()
        return report
