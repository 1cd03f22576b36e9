"""Which parts of a run are on the devices in which phase: one table, from which all moves follow.

Parts take turns only where the engine shares the devices of the trainer (colocate). An engine that shares the very
weights (trainside) has nothing to move, and a part on devices of its own makes room for no other part: these stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast, get_args

from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.pool import Pool
from unirl.plan.placement import PlacementPlan, Relation
from unirl.rollout.engine.base import DedicatedEngine
from unirl.tracking.tracker import PhaseTimers
from unirl.train.backend.base import Offloadable
from unirl.trainer.roles import Roles

Phase = Literal["sync", "generate", "reward", "train", "eval", "checkpoint"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MemoryPart = Literal["policy", "optimizer", "frozen", "engine", "reward"]
"""policy: the trained module, its gradients and snapshots. optimizer: its state. frozen: the encoders and the VAE of
the trained pipeline, which moves them itself (pipeline.keep_resident). engine: a dedicated engine's whole model."""

BACKEND_PARTS: tuple[Offloadable, ...] = get_args(Offloadable)
"""The parts that the train backend moves."""

_DEDICATED: Mapping[Phase, tuple[MemoryPart, ...]] = {
    "sync": ("policy", "engine"),
    "generate": ("engine",),
    "reward": ("reward",),
    "train": ("policy", "optimizer"),
    "eval": ("engine", "reward"),
    "checkpoint": ("policy", "optimizer"),
}
NEEDS: Mapping[Relation, Mapping[Phase, tuple[MemoryPart, ...]]] = {
    "trainside": {
        "sync": (),
        "generate": ("policy", "frozen"),
        "reward": ("reward",),
        "train": ("policy", "optimizer"),
        "eval": ("policy", "frozen", "reward"),
        "checkpoint": ("policy", "optimizer"),
    },
    "colocate": _DEDICATED,
    "separate": _DEDICATED,
}
"""What each phase works with."""

MAX_STALENESS: Mapping[Relation, int | None] = {"trainside": 0, "colocate": 0, "separate": None}
"""Updates by which samples may lag behind the weights that they train; None = as many as the recipe allows."""


def home_of(plan: PlacementPlan, part: MemoryPart) -> DeviceSet:
    """The devices that a part lives on, whichever processes hold it."""
    return {"engine": plan.rollout, "reward": plan.reward}.get(part, plan.train).devices


def memory_parts(plan: PlacementPlan) -> tuple[MemoryPart, ...]:
    """The parts that a run of this plan has."""
    return tuple(part for part in get_args(MemoryPart) if any(part in needs for needs in NEEDS[plan.relation].values()))


def takes_turns(plan: PlacementPlan, part: MemoryPart) -> bool:
    """Whether a part leaves its devices while others use them."""
    return plan.relation == "colocate" and home_of(plan, part) == plan.train.devices


def resident(plan: PlacementPlan, phase: Phase) -> tuple[MemoryPart, ...]:
    """The parts that are on their devices in a phase: those that it needs, and those that never move."""
    needs = NEEDS[plan.relation][phase]
    return tuple(part for part in memory_parts(plan) if part in needs or not takes_turns(plan, part))


class Residency:
    """Brings in what a phase needs, after sending away what it does not need."""

    def __init__(self, plan: PlacementPlan, roles: Roles) -> None:
        """
        Args:
            roles: all of their parts are on their devices now.
        """
        self.plan = plan
        self.roles = roles
        self.here: set[MemoryPart] = set(memory_parts(plan))
        """The parts that are on their devices."""

    def enter(self, phase: str) -> None:
        """Make exactly the parts of `phase` resident."""
        assert phase in PHASES, f"{phase!r} is no phase of the residency table"
        wanted = set(resident(self.plan, phase))
        self._send_away(self.here - wanted)
        self.here &= wanted
        self._bring_in(wanted - self.here)
        self.here = wanted

    def _send_away(self, parts: set[MemoryPart]) -> None:
        if "engine" in parts:
            self._engine.sleep()
        if "reward" in parts:
            self.roles.reward.offload(["reward"])
        if own := [name for name in BACKEND_PARTS if name in parts]:
            self.roles.backend.offload(own)

    def _bring_in(self, parts: set[MemoryPart]) -> None:
        if "engine" in parts:
            self._engine.wake_up()
        if "reward" in parts:
            self.roles.reward.onload(["reward"])
        if own := [name for name in BACKEND_PARTS if name in parts]:
            self.roles.backend.onload(own)

    @property
    def _engine(self) -> DedicatedEngine:
        """The rollout role. Only an engine with weights of its own has the part `engine`."""
        return cast(DedicatedEngine, self.roles.rollout)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Opens the phases of a step: `with phases("generate"): ...`."""

    timers: PhaseTimers
    pool: Pool
    residency: Residency

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block, bring in the parts that it needs, and end it when it passes its deadline."""
        with self.timers.phase(name), self.pool.watch(name):
            self.residency.enter(name)
            yield
