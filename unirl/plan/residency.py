"""Which parts of the roles are on the devices in which phase of a step.

Parts take turns only where the engine shares the devices of the trainer (colocate). An engine that shares the very
weights (trainside) has nothing to move, and a part on devices of its own makes room for no other part: these stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from unirl.config.device_sets import DeviceSet
from unirl.plan.placement import PlacementPlan, Relation

Phase = Literal["sync", "generate", "reward", "train", "eval", "checkpoint"]
Idle = Literal["idle"]
IDLE: Idle = "idle"
"""In place of a phase: the policy does nothing while another one works."""
PHASES: tuple[Phase, ...] = get_args(Phase)

MemoryPart = Literal["policy", "optimizer", "frozen", "engine", "reward"]
"""policy: the trained module, its gradients and snapshots. optimizer: its state. frozen: the encoders and the VAE of
the trained pipeline, which moves them itself (pipeline.keep_resident). engine: a dedicated engine's whole model."""

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


def home_of(plan: PlacementPlan, part: MemoryPart) -> DeviceSet:
    """The devices that a part lives on, whichever processes hold it."""
    return {"engine": plan.rollout, "reward": plan.reward}.get(part, plan.train).devices


def memory_parts(plan: PlacementPlan) -> tuple[MemoryPart, ...]:
    """The parts that a run of this plan has."""
    return tuple(part for part in get_args(MemoryPart) if any(part in needs for needs in NEEDS[plan.relation].values()))


def takes_turns(plan: PlacementPlan, part: MemoryPart) -> bool:
    """Whether a part leaves its devices while others use them."""
    return plan.relation == "colocate" and home_of(plan, part) == plan.train.devices


def resident(plan: PlacementPlan, phase: Phase | Idle) -> tuple[MemoryPart, ...]:
    """The parts that are on their devices in a phase: those that it needs, and those that never move."""
    needs = () if phase == IDLE else NEEDS[plan.relation][phase]
    return tuple(part for part in memory_parts(plan) if part in needs or not takes_turns(plan, part))
