"""The devices of every role. Transport, offloading and legal schedules are derived from this placement.

    placement: {train: 0-3, rollout: 4-7}    disjoint device sets: separate
    placement: {train: 0-3, rollout: 0-3}    equal device sets: colocate, the roles take turns
    placement: {train: 0, rollout: rest}     separate: rollout has all devices that no other role names
    placement: {train: gpus, rollout: hosts} separate: labels of node_groups stand for the devices of their nodes
    (none)                                   all roles on all devices

An engine without weights of its own samples with the train role's modules: trainside. In colocate the roles also share
the worker processes, unless weights travel by CUDA IPC: then the engine has a second process on each device.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from unirl.config.device_sets import REST, DeviceSet, device_set_at, everywhere, example, show, spell, with_rest
from unirl.config.errors import ConfigError, GeometryError, IncompatibleError, did_you_mean
from unirl.config.node import Node
from unirl.config.node_groups import NodeGroups, check_groups, devices_of_groups, group_of_device, numbered
from unirl.config.recipe import RecipeConfig, Where
from unirl.config.schema import dotted_name
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.types.protocols import Capabilities

ROLES = ("train", "rollout", "reward")

Relation = Literal["trainside", "colocate", "separate"]
"""How rollout relates to train: it uses the same modules, the same devices in turns, or devices of its own."""

REPLICA = dotted_name(ReplicaRolloutEngine)
SYNC = dotted_name(EngineSync)


def capabilities_of(node: Node) -> Capabilities:
    """The capabilities that a node's class declares, read without building it; the defaults if it declares none."""
    declared = inspect.getattr_static(node.schema.owner, "capabilities", None)
    return declared if isinstance(declared, Capabilities) else Capabilities()


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """The device set of every role."""

    train: DeviceSet
    rollout: DeviceSet
    reward: DeviceSet
    relation: Relation
    node_groups: NodeGroups = field(default_factory=dict)
    is_elastic: bool = False
    """The training devices sample as well while they wait for samples."""

    @property
    def is_dedicated(self) -> bool:
        """True if the engine has weights of its own, which must be sent to it."""
        return self.relation != "trainside"

    @property
    def device_sets(self) -> dict[str, DeviceSet]:
        """Role to device set."""
        return {"train": self.train, "rollout": self.rollout, "reward": self.reward}

    def describe(self) -> str:
        """`separate: train on devices 0-3, rollout and reward on devices 4-7`."""
        roles: dict[DeviceSet, list[str]] = {}
        for role, device_set in self.device_sets.items():
            roles.setdefault(device_set, []).append(role)
        return f"{self.relation}: " + ", ".join(
            f"{_list(names)} on {self.words_of(device_set)}{' in processes of their own' if device_set.process else ''}"
            for device_set, names in roles.items()
        )

    def words_of(self, device_set: DeviceSet) -> str:
        """`devices 0-3`, with the groups of nodes that have them: `devices 0-3 (gpus)`."""
        labels = dict.fromkeys(
            group_of_device(self.node_groups, index)
            for index in device_set.indices
            if self.node_groups and device_set.kind == "device"
        )
        return f"{device_set.words} ({', '.join(labels)})" if labels else device_set.words

    def rows_of_nodes(self) -> list[tuple[str, str, str, dict[str, str]]]:
        """What each part of each group of nodes does: (group, nodes, devices, phase -> roles that work there)."""
        rows = []
        for label, devices in devices_of_groups(self.node_groups).items():
            parts = [part for part in self._parts() if {*part.indices} & {*devices}]
            for part in parts:
                if part.kind == "device":
                    own = DeviceSet("device", tuple(index for index in part.indices if index in devices))
                    rows.append((label, self.node_groups[label].words, own.words, self._roles_by_phase(part)))
        return rows

    def rows_of_devices(self) -> list[tuple[str, dict[str, str]]]:
        """A row for each set of devices: its devices, and the roles that work there, by phase."""
        return [(self.words_of(part), self._roles_by_phase(part)) for part in self._parts()]

    def _parts(self) -> list[DeviceSet]:
        """The device sets of the roles, without regard to processes."""
        return list(dict.fromkeys(each.devices for each in self.device_sets.values() if len(each)))

    def _roles_by_phase(self, part: DeviceSet) -> dict[str, str]:
        """The role that works on these devices in each phase of a step."""
        roles = {role for role, device_set in self.device_sets.items() if device_set.devices == part}
        synced = roles & {"train", "rollout"} if self.is_dedicated else set()
        by_phase = {"sync": synced, "generate": {"rollout"}, "reward": {"reward"}, "train": {"train"}}
        cells = {
            phase: _list(sorted(working & roles)) if working & roles else "-" for phase, working in by_phase.items()
        }
        if self.is_elastic and part == self.train.devices:
            cells["generate"] = "rollout, while train waits"
        return cells


def plan_of(config: RecipeConfig) -> PlacementPlan:
    """The devices that a recipe gives to every role.

    Raises:
        ConfigError: 2003 unknown role, 2004 devices that cannot be read, 2010 device sets that do not fit the pool or
            each other, 2020 a layout that the engine cannot have.
    """
    placement = _placement_of(config)
    dedicated = capabilities_of(config.rollout).dedicated
    engine = config.rollout.class_name
    train = _train_device_set(placement, config.num_devices)
    rollout = _rollout_device_set(placement, train, config.num_devices, engine, dedicated)
    relation: Relation = "trainside"
    if dedicated:
        relation = "colocate" if train == rollout else "separate"
    # CUDA IPC connects two processes of a device, which only workers are.
    if relation == "colocate" and config.runtime_in_use == "ray" and config.sync_transport == "cuda_ipc":
        rollout = replace(rollout, process=1)
    where = placement.get("reward", "in rollout")
    if where in ("in train", "in rollout"):
        reward = train if where == "in train" else rollout
    else:
        reward = device_set_at("reward", where, config.num_devices)
    plan = PlacementPlan(
        train=train,
        rollout=rollout,
        reward=reward,
        relation=relation,
        node_groups=config.node_groups or {},
        is_elastic=config.asynchronous.elastic,
    )
    _check_overlaps(plan, config.num_devices)
    _check_all_used(plan, config.num_devices, config.node_groups or {})
    return plan


def _placement_of(config: RecipeConfig) -> dict[str, Where]:
    """The placement of a recipe, of known roles, with numbers in place of `rest`."""
    placement = {} if config.placement is None else dict(config.placement)
    groups = config.node_groups or {}
    if groups:
        check_groups(groups, config.num_devices, config.devices_per_node)
    for role in placement:
        if role in ("env", "envs", "environment", "environments"):
            raise ConfigError(
                f"placement.{role}: environments run in the processes of the rollout. Write rollout: "
                f"{show(placement[role])}"
            )
        if role not in ROLES:
            raise ConfigError(
                f"placement.{role}: there is no such role.{did_you_mean(role, ROLES)} Roles: {', '.join(ROLES)}"
            )
    in_numbers = cast(dict[str, Where], with_rest(numbered(placement, groups), config.num_devices))
    for role, where in placement.items():
        if where == REST and in_numbers[role] == str(config.num_devices):
            raise GeometryError(
                f"placement.{role}=rest is no device: the other roles name all of num_devices={config.num_devices}. "
                f"Set num_devices={config.num_devices + 1}, or give them fewer"
            )
    return in_numbers


def _train_device_set(placement: Mapping[str, Where], num_devices: int) -> DeviceSet:
    if "train" in placement:
        return device_set_at("train", placement["train"], num_devices)
    if placement.get("rollout", "in train") != "in train":
        raise GeometryError(f"placement names devices for rollout and none for train. Write {example(num_devices)}")
    return everywhere(num_devices)


def _rollout_device_set(
    placement: Mapping[str, Where], train: DeviceSet, num_devices: int, engine: str, dedicated: bool
) -> DeviceSet:
    where = placement.get("rollout", None if dedicated else "in train")
    if where is None:
        return train
    if dedicated and where == "in train":
        raise IncompatibleError(
            f"placement.rollout=in train samples with the trained weights themselves, and {engine} has weights of its "
            f"own. Write rollout: {train} to take turns on these devices, or name other devices"
        )
    if not dedicated and where != "in train":
        raise IncompatibleError(
            f"placement.rollout={show(where)} gives the engine devices of its own, and {engine} samples with the "
            f"trained weights themselves. Write rollout: in train, or use an engine with weights of its own: "
            f"rollout._target_={REPLICA} sync._target_={SYNC}"
        )
    return train if where == "in train" else device_set_at("rollout", where, num_devices)


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# Rules between the device sets of one pool


def _check_overlaps(plan: PlacementPlan, num_devices: int) -> None:
    for one, other in (("rollout", "train"), ("reward", "train"), ("reward", "rollout")):
        a, b = plan.device_sets[one], plan.device_sets[other]
        shared = sorted(set(a.indices) & set(b.indices)) if a.kind == b.kind == "device" else []
        if shared and a.devices != b.devices:
            ways = (
                f"rollout: {b} to take turns, or {example(num_devices)} to use separate devices"
                if one == "rollout"
                else "reward: in train, in rollout, cpu, or devices of its own"
            )
            raise GeometryError(
                f"placement: {one} ({a}) and {other} ({b}) share only {spell(shared)}; two roles share all of their "
                f"devices or none. Write {ways}"
            )


def _check_all_used(plan: PlacementPlan, num_devices: int, groups: NodeGroups) -> None:
    on_devices = [device_set for device_set in plan.device_sets.values() if device_set.kind == "device"]
    used = {index for device_set in on_devices for index in device_set.indices}
    idle = [index for index in range(num_devices) if index not in used]
    if idle and groups:
        labels = ", ".join(dict.fromkeys(group_of_device(groups, index) for index in idle))
        raise GeometryError(
            f"placement leaves {DeviceSet('device', tuple(idle)).words} of the groups of nodes ({labels}) without a "
            f"role. Place a role there, such as rollout: {labels.partition(',')[0]}, or lower devices_per_node of the "
            "group"
        )
    if idle:
        line = example(num_devices) if plan.is_dedicated else "placement.train=all"
        fewer = f", or set num_devices={len(used)}" if idle[0] == len(used) else ""
        raise GeometryError(
            f"placement leaves {DeviceSet('device', tuple(idle)).words} of num_devices={num_devices} without a role. "
            f"Give every device one, such as {line}{fewer}"
        )
