"""The residency table, exhaustively: what a phase needs is there, and in colocate nothing else is."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import pytest

from unirl.config.device_sets import DeviceSet
from unirl.plan.placement import PlacementPlan
from unirl.plan.residency import NEEDS, PHASES, home_of, memory_parts, resident, takes_turns
from unirl.trainer.residency import Residency

TRAIN, OTHER, THIRD, CPU = (
    DeviceSet("device", (0, 1)),
    DeviceSet("device", (2, 3)),
    DeviceSet("device", (4,)),
    DeviceSet("cpu", (0,)),
)
BESIDE = DeviceSet("device", (0, 1), process=1)

PLANS = {
    "trainside": PlacementPlan(train=TRAIN, rollout=TRAIN, reward=TRAIN, relation="trainside"),
    "trainside, reward apart": PlacementPlan(train=TRAIN, rollout=TRAIN, reward=CPU, relation="trainside"),
    "colocate": PlacementPlan(train=TRAIN, rollout=TRAIN, reward=TRAIN, relation="colocate"),
    "colocate, processes apart": PlacementPlan(train=TRAIN, rollout=BESIDE, reward=BESIDE, relation="colocate"),
    "colocate, processes and reward apart": PlacementPlan(
        train=TRAIN, rollout=BESIDE, reward=TRAIN, relation="colocate"
    ),
    "colocate, reward apart": PlacementPlan(train=TRAIN, rollout=TRAIN, reward=OTHER, relation="colocate"),
    "colocate, reward on the host": PlacementPlan(train=TRAIN, rollout=TRAIN, reward=CPU, relation="colocate"),
    "separate": PlacementPlan(train=TRAIN, rollout=OTHER, reward=OTHER, relation="separate"),
    "separate, reward beside the trainer": PlacementPlan(train=TRAIN, rollout=OTHER, reward=TRAIN, relation="separate"),
    "separate, reward apart": PlacementPlan(train=TRAIN, rollout=OTHER, reward=THIRD, relation="separate"),
}
OWN = {"rollout": {"engine"}, "reward": {"reward"}, "backend": {"policy", "optimizer"}}


class Device:
    """What really lies on the devices, as the moves say; `log` holds them in order."""

    def __init__(self, plan):
        self.here = set(memory_parts(plan))
        self.log = []

    def move(self, kind, parts):
        assert parts
        for part in parts:
            assert (part in self.here) == (kind == "out"), f"{part} is moved {kind} twice"
        self.here = self.here - set(parts) if kind == "out" else self.here | set(parts)
        self.log.append((kind, tuple(parts)))


@dataclasses.dataclass
class Role:
    """A handle of one role that knows only its own parts."""

    name: str
    device: Device

    def offload(self, parts):
        self._move("out", parts)

    def onload(self, parts):
        self._move("in", parts)

    def sleep(self):
        self._move("out", ["engine"])

    def wake_up(self):
        self._move("in", ["engine"])

    def _move(self, kind, parts):
        assert set(parts) <= OWN[self.name]
        self.device.move(kind, parts)


def residency(plan):
    device = Device(plan)
    return Residency(plan, SimpleNamespace(**{name: Role(name, device) for name in OWN})), device


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_whatever_came_before_a_phase_finds_what_it_needs(plan):
    for before, after in product(PHASES, PHASES):
        mover, device = residency(plan)
        mover.enter(before)
        mover.enter(after)
        assert set(NEEDS[plan.relation][after]) <= device.here
        assert device.here == set(resident(plan, after)) == mover.here


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("colocate")])
def test_in_colocate_nothing_else_is_on_the_shared_devices(name):
    plan = PLANS[name]
    for phase in PHASES:
        shared = {part for part in resident(plan, phase) if home_of(plan, part) == plan.train}
        assert shared == {part for part in NEEDS["colocate"][phase] if home_of(plan, part) == plan.train}


@pytest.mark.parametrize("name", ["colocate, processes apart", "colocate, processes and reward apart"])
def test_a_second_process_on_a_device_changes_nothing_about_what_is_there(name):
    for phase in PHASES:
        assert resident(PLANS[name], phase) == resident(PLANS["colocate"], phase)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_only_roles_that_share_with_the_trainer_in_colocate_ever_move(plan):
    mover, device = residency(plan)
    for phase in (*PHASES, *PHASES):
        mover.enter(phase)
    moved = {part for _, parts in device.log for part in parts}
    assert moved == {part for part in memory_parts(plan) if takes_turns(plan, part)}
    if plan.relation != "colocate":
        assert device.log == []


def test_a_phase_frees_before_it_loads_and_moves_only_what_changes():
    mover, device = residency(PLANS["colocate"])
    mover.enter("train")
    device.log.clear()
    mover.enter("train")
    assert device.log == []
    mover.enter("sync")
    assert device.log == [("out", ("optimizer",)), ("in", ("engine",))]
    device.log.clear()
    for phase in ("generate", "reward", "train", "checkpoint"):
        mover.enter(phase)
    assert device.log == [
        ("out", ("policy",)),
        ("out", ("engine",)),
        ("in", ("reward",)),
        ("out", ("reward",)),
        ("in", ("policy", "optimizer")),
    ]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_policy_is_there_whenever_it_is_read_or_written(plan):
    for phase in ("sync", "train", "checkpoint"):
        assert (phase == "sync" and plan.relation == "trainside") or "policy" in NEEDS[plan.relation][phase]
        assert "policy" in resident(plan, phase)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sampling_and_training_can_run_at_once_only_where_nothing_takes_turns(plan):
    apart = home_of(plan, "policy") != home_of(plan, "engine" if plan.is_dedicated else "policy")
    both = set(NEEDS[plan.relation]["generate"]) | set(NEEDS[plan.relation]["train"])
    at_once = apart and all(both <= set(resident(plan, phase)) for phase in PHASES)
    assert (plan.relation == "separate") == at_once


def test_a_phase_that_is_not_in_the_table_is_a_mistake_of_ours():
    mover, _ = residency(PLANS["trainside"])
    with pytest.raises(AssertionError, match="no phase"):
        mover.enter("lunch")
