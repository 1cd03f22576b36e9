"""Which parts of a run are on the devices in which phase: one table, from which all moves follow.

Parts on the same devices take turns only where the engine shares the trainer's (colocate), in its processes or in
others. Trainside shares the very weights, and a part on devices of its own has nobody to make room for: these stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Handle
from unirl.plan.placement import PlacementPlan, Relation

Phase = Literal["sync", "generate", "reward", "train", "eval", "checkpoint"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Part = Literal["policy", "optimizer", "frozen", "engine", "reward"]
"""policy: the trained module, its gradients and snapshots. optimizer: its state. frozen: the encoders and the VAE of
the trained pipeline, which moves them itself (pipeline.keep_resident). engine: a dedicated engine's whole model."""

_DEDICATED: Mapping[Phase, tuple[Part, ...]] = {
    "sync": ("policy", "engine"),
    "generate": ("engine",),
    "reward": ("reward",),
    "train": ("policy", "optimizer"),
    "eval": ("engine", "reward"),
    "checkpoint": ("policy", "optimizer"),
}
NEEDS: Mapping[Relation, Mapping[Phase, tuple[Part, ...]]] = {
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


def home_of(plan: PlacementPlan, part: Part) -> DeviceSet:
    """The devices that a part lives on, whichever processes hold it."""
    return {"engine": plan.rollout, "reward": plan.reward}.get(part, plan.train).devices


def parts_of(plan: PlacementPlan) -> tuple[Part, ...]:
    """The parts that a run of this plan has."""
    return tuple(part for part in get_args(Part) if any(part in needs for needs in NEEDS[plan.relation].values()))


def takes_turns(plan: PlacementPlan, part: Part) -> bool:
    """Whether a part leaves its devices while others use them."""
    return plan.relation == "colocate" and home_of(plan, part) == plan.train.devices


def resident(plan: PlacementPlan, phase: Phase) -> tuple[Part, ...]:
    """The parts that are on their devices in a phase: those it needs, and all that never leave."""
    needs = NEEDS[plan.relation][phase]
    return tuple(part for part in parts_of(plan) if part in needs or not takes_turns(plan, part))


class Residency:
    """Brings in what a phase needs, after sending away what it does not; remembers what is where."""

    def __init__(self, plan: PlacementPlan, handles: Mapping[str, Handle]) -> None:
        """
        Args:
            handles: the roles `backend`, `reward` and `rollout`; all parts are on their devices now.
        """
        self.plan = plan
        self.handles = handles
        self.here: set[Part] = set(parts_of(plan))

    def enter(self, phase: str) -> None:
        """Make exactly the parts of `phase` resident."""
        assert phase in PHASES, f"{phase!r} is no phase of the residency table"
        wanted = set(resident(self.plan, phase))
        for handle, parts in self._by_role(self.here - wanted):
            self._send_away(handle, parts)
        self.here &= wanted
        for handle, parts in self._by_role(wanted - self.here):
            self._bring_in(handle, parts)
        self.here = wanted

    def assert_resident(self, part: Part) -> None:
        """A check for callers that touch a part's tensors."""
        assert part in self.here, f"{part} is used while it is away; on the devices: {', '.join(sorted(self.here))}"

    def _by_role(self, parts: set[Part]) -> Iterator[tuple[str, list[Part]]]:
        """Role and its parts among `parts`, so that one call moves them all."""
        for role, own in (("rollout", ("engine",)), ("reward", ("reward",)), ("backend", ("policy", "optimizer"))):
            moved = [part for part in own if part in parts]
            if moved:
                yield role, moved

    def _send_away(self, role: str, parts: list[Part]) -> None:
        if role == "rollout":
            self.handles[role].sleep()
        else:
            self.handles[role].offload(parts)

    def _bring_in(self, role: str, parts: list[Part]) -> None:
        if role == "rollout":
            self.handles[role].wake_up()
        else:
            self.handles[role].onload(parts)
