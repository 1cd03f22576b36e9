"""Who sits where: roles on slabs of the pool's devices. All else about a layout is derived from it.

    placement: {train: 0-3, rollout: 4-7}    disjoint slabs: separate
    placement: {train: 0-3, rollout: 0-3}    equal slabs: colocate, they take turns
    (none)                                   all roles on all devices

An engine without weights of its own samples in the train role itself: trainside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unirl.config.declared import capabilities_of
from unirl.config.errors import ConfigError, did_you_mean
from unirl.config.recipe import RecipeConfig, Where

GEOMETRY, UNSUPPORTED = 2010, 2020

ROLES = ("train", "rollout", "reward")

Relation = Literal["trainside", "colocate", "separate"]
"""Of rollout to train: the same objects, the same devices in turns, devices of its own."""

REPLICA = "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine"
SYNC = "unirl.distributed.weight_sync.sync.EngineSync"


@dataclass(frozen=True)
class Slab:
    """Devices (or processes of the host's own CPUs) that one group of sibling roles shares."""

    kind: Literal["device", "cpu"]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu" if len(self) == 1 else f"cpu x{len(self)}"
        return spell(self.indices)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The slab of every role."""

    train: Slab
    rollout: Slab
    reward: Slab
    relation: Relation

    @property
    def is_dedicated(self) -> bool:
        """Whether the engine has weights of its own, which must be sent to it."""
        return self.relation != "trainside"

    @property
    def slabs(self) -> dict[str, Slab]:
        """Role to slab."""
        return {"train": self.train, "rollout": self.rollout, "reward": self.reward}


def plan_of(config: RecipeConfig) -> Plan:
    """The plan of a recipe.

    Raises:
        ConfigError: 2003 unknown role, 2004 a place that cannot be read, 2010 slabs that do not fit the pool or each
            other, 2020 a layout that the engine cannot have.
    """
    placement = {} if config.placement is None else dict(config.placement)
    _check_roles(placement)
    dedicated = capabilities_of(config.rollout).dedicated
    engine = config.rollout.schema.owner.__name__
    train = _train_slab(placement, config.num_devices)
    rollout = _rollout_slab(placement, train, config.num_devices, engine, dedicated)
    reward = _reward_slab(placement, train, rollout, config.num_devices)
    relation = _relation(train, rollout) if dedicated else "trainside"
    plan = Plan(train=train, rollout=rollout, reward=reward, relation=relation)
    _check_overlaps(plan, config.num_devices)
    _check_all_used(plan, config.num_devices)
    return plan


def _check_roles(placement: Mapping[str, Where]) -> None:
    for role in placement:
        if role not in ROLES:
            raise ConfigError(
                f"placement.{role} is no role that can be placed.{did_you_mean(role, ROLES)} Roles: {', '.join(ROLES)}"
            )


def _train_slab(placement: Mapping[str, Where], num_devices: int) -> Slab:
    if "train" in placement:
        return _slab("train", placement["train"], num_devices)
    if placement.keys() & {"rollout"} and placement["rollout"] != "in train":
        raise ConfigError(
            f"placement places rollout and not train. Write {example(num_devices)}",
            code=GEOMETRY,
        )
    return everywhere(num_devices)


def _rollout_slab(placement: Mapping[str, Where], train: Slab, num_devices: int, engine: str, dedicated: bool) -> Slab:
    where = placement.get("rollout", None if dedicated else "in train")
    if where is None:
        return train
    if dedicated and where == "in train":
        raise ConfigError(
            f"placement.rollout=in train means sampling with the trained weights themselves, and {engine} holds its "
            f"own. Write rollout: {train} to take turns on these devices, or name others",
            code=UNSUPPORTED,
        )
    if not dedicated and where != "in train":
        raise ConfigError(
            f"placement.rollout={show(where)} gives the engine a place of its own, and {engine} samples with the "
            f"trained weights themselves. Write rollout: in train; or an engine that holds its own weights, "
            f"rollout._target_={REPLICA} sync._target_={SYNC}",
            code=UNSUPPORTED,
        )
    return train if where == "in train" else _slab("rollout", where, num_devices)


def _reward_slab(placement: Mapping[str, Where], train: Slab, rollout: Slab, num_devices: int) -> Slab:
    where = placement.get("reward", "in rollout")
    beside = {"in train": train, "in rollout": rollout}
    if isinstance(where, str) and where in beside:
        return beside[where]
    return _slab("reward", where, num_devices)


def _relation(train: Slab, rollout: Slab) -> Relation:
    return "colocate" if train == rollout else "separate"


# Places as recipes write them


def _slab(role: str, where: Where, num_devices: int) -> Slab:
    """The slab of one place: `0-3`, `0,2`, `3`, `[0, 2]`, `all`; for rewards also `cpu` and `cpu x2`."""
    if where == "all":
        return everywhere(num_devices)
    cpu = re.fullmatch(r"cpu(?: ?x ?(\d{1,4}))?", where) if isinstance(where, str) else None
    if cpu:
        return _cpu_slab(role, where, int(cpu[1] or 1))
    found: list[int] = []
    for first, last in _ranges(role, where):
        _check_range(role, where, first, last, num_devices)
        found += range(first, last + 1)
    twice = sorted({index for index in found if found.count(index) > 1})
    if twice:
        raise ConfigError(f"placement.{role}={show(where)} names device {twice[0]} twice", code=GEOMETRY)
    return Slab("device", tuple(sorted(found)))


def _cpu_slab(role: str, where: Where, count: int) -> Slab:
    if role != "reward":
        raise ConfigError(
            f"placement.{role}={where}: only reward leaves the devices (where there is no GPU, a device is a CPU "
            f"process). Write {role}: all, or devices such as 0-3",
            code=UNSUPPORTED,
        )
    if count < 1:
        raise ConfigError(f"placement.{role}={where}: that is no process. Write cpu, or cpu x2", code=2004)
    return Slab("cpu", tuple(range(count)))


def _ranges(role: str, where: Where) -> Iterator[tuple[int, int]]:
    """First and last device of every piece."""
    pieces = [str(piece) for piece in where] if isinstance(where, Sequence) and not isinstance(where, str) else None
    for piece in str(where).split(",") if pieces is None else pieces:
        match = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", piece.strip(), re.ASCII)
        if not match:
            raise ConfigError(
                f"placement.{role}={show(where)} is no place. Write devices (0-3, or 0,2, or 3), all{_words_of(role)}",
                code=2004,
            )
        yield int(match[1]), int(match[2] or match[1])
    if pieces == []:
        raise ConfigError(f"placement.{role}=[] names no device. Write devices such as 0-3, or all", code=2004)


def _words_of(role: str) -> str:
    return {"rollout": ", in train", "reward": ", in train, in rollout, cpu or cpu x2"}.get(role, "")


def _check_range(role: str, where: Where, first: int, last: int, num_devices: int) -> None:
    if last < first:
        raise ConfigError(
            f"placement.{role}={show(where)} runs backwards: write {last}-{first}",
            code=GEOMETRY,
        )
    if last >= num_devices:
        raise ConfigError(
            f"placement.{role}={show(where)} names device {last}, and num_devices={num_devices} has only "
            f"{spell(range(num_devices))}. Set num_devices={last + 1}, or write {example(num_devices)}",
            code=GEOMETRY,
        )


def everywhere(num_devices: int) -> Slab:
    """All devices of the pool."""
    return Slab("device", tuple(range(num_devices)))


def spell(indices: Sequence[int]) -> str:
    """Sorted device numbers as recipes write them: `0-3`, `0,2`, `5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def show(where: Where) -> str:
    """A place as the recipe wrote it."""
    return str(where) if isinstance(where, (str, int)) else f"[{', '.join(map(str, where))}]"


def example(num_devices: int, num_train: int | None = None) -> str:
    """The line that gives train the first devices (absent = half of them) and rollout the others."""
    if num_devices == 1:
        return "placement={train: 0, rollout: 0}"
    half = num_devices // 2 if num_train is None else num_train
    return f"placement={{train: {spell(range(half))}, rollout: {spell(range(half, num_devices))}}}"


# Slabs of one pool


def _check_overlaps(plan: Plan, num_devices: int) -> None:
    for one, other in (("rollout", "train"), ("reward", "train"), ("reward", "rollout")):
        a, b = plan.slabs[one], plan.slabs[other]
        shared = sorted(set(a.indices) & set(b.indices)) if a.kind == b.kind == "device" else []
        if shared and a != b:
            ways = (
                f"rollout: {b} to take turns, or {example(num_devices)} to run apart"
                if one == "rollout"
                else "reward: in train, in rollout, cpu, or devices of its own"
            )
            raise ConfigError(
                f"placement: {one} ({a}) and {other} ({b}) share only {spell(shared)}; two roles share all of their "
                f"devices or none. Write {ways}",
                code=GEOMETRY,
            )


def _check_all_used(plan: Plan, num_devices: int) -> None:
    used = {index for slab in plan.slabs.values() if slab.kind == "device" for index in slab.indices}
    idle = [index for index in range(num_devices) if index not in used]
    if idle:
        fewer = f" or set num_devices={len(used)}" if idle[0] == len(used) else ""
        raise ConfigError(
            f"placement leaves {'device' if len(idle) == 1 else 'devices'} {spell(idle)} of num_devices={num_devices} "
            f"without a role. Give them one, such as {example(num_devices)},{fewer or ' or name all'}",
            code=GEOMETRY,
        )
