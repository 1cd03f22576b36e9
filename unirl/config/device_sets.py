"""Device sets, and how recipes write them: `0-3`, `0,2`, `3`, `[0, 2]`, `all`, `rest`, `cpu`, `cpu x2`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeGuard

from unirl.config.errors import ConfigError, GeometryError, IncompatibleError, InvalidValueError
from unirl.config.ranks import rank_items
from unirl.config.recipe import MAX_DEVICES, Where

REST = "rest"
"""A place: all devices of the pool that no other role names."""


@dataclass(frozen=True)
class DeviceSet:
    """The devices, or the CPU processes of the host, that a group of roles shares."""

    kind: Literal["device", "cpu"]
    indices: tuple[int, ...]
    process: int = 0
    """The worker process of each device: 0 = the first, 1 = a second process on the same device."""

    def __len__(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu" if len(self) == 1 else f"cpu x{len(self)}"
        return spell(self.indices)

    @property
    def devices(self) -> DeviceSet:
        """The same devices, for comparisons that ignore the process."""
        return DeviceSet(self.kind, self.indices)

    @property
    def words(self) -> str:
        """`device 0`, `devices 0-3` or `cpu x2`, for messages."""
        if self.kind == "cpu":
            return str(self)
        return f"{'device' if len(self) == 1 else 'devices'} {self}"


def device_set_at(role: str, where: Where, num_devices: int) -> DeviceSet:
    """The device set that `0-3`, `0,2`, `3`, `[0, 2]` or `all` names; for rewards also `cpu` and `cpu x2`."""
    if where == "all":
        return everywhere(num_devices)
    if isinstance(where, str) and (cpu := re.fullmatch(r"cpu(?: ?x ?(\d{1,4}))?", where)):
        return _cpu_device_set(role, where, int(cpu[1] or 1))
    items = [str(where)] if isinstance(where, (str, int)) else [str(item) for item in where]
    if not items:
        raise InvalidValueError(f"placement.{role}=[] names no device. Write devices such as 0-3, or all")
    indices = [index for item in items for index in _devices_of(item, role, where, num_devices)]
    twice = sorted(index for index, count in Counter(indices).items() if count > 1)
    if twice:
        raise GeometryError(f"placement.{role}={show(where)} names device {twice[0]} twice")
    return DeviceSet("device", tuple(sorted(indices)))


def _cpu_device_set(role: str, where: str, count: int) -> DeviceSet:
    if role != "reward":
        raise IncompatibleError(
            f"placement.{role}={where}: only the reward may run outside the devices (without a GPU, a device is a CPU "
            f"process). Write {role}: all, or devices such as 0-3"
        )
    if count < 1:
        raise InvalidValueError(f"placement.{role}={where} is no process at all. Write cpu, or cpu x2")
    return DeviceSet("cpu", tuple(range(count)))


def _devices_of(item: str, role: str, where: Where, num_devices: int) -> Iterator[int]:
    """The devices that one item of a placement names, such as `3`, `0-3` or `0,2`."""
    words = {"rollout": ", in train", "reward": ", in train, in rollout, cpu or cpu x2"}.get(role, "")
    for each in rank_items(f"placement.{role}", item, f"devices such as 0-3, 0,2 or 3, or all, rest{words}"):
        devices = each.resources
        if devices[-1] >= num_devices:
            raise GeometryError(
                f"placement.{role}={show(where)} names device {devices[-1]}, and num_devices={num_devices} has only "
                f"{everywhere(num_devices).words}. Set num_devices={devices[-1] + 1}, or name devices of the pool"
            )
        yield from devices


def with_rest(placement: Mapping[str, object], num_devices: int) -> dict[str, object]:
    """The placement with `rest` replaced by the devices of the pool that no other role names.

    If the others name all of them, `rest` is the first device that the pool does not have.
    """
    named = {index for devices in _named_device_sets(placement).values() for index in devices.indices}
    free = [index for index in range(num_devices) if index not in named] or [num_devices]
    return {role: spell(free) if place == REST else place for role, place in placement.items()}


def everywhere(num_devices: int) -> DeviceSet:
    """All devices of the pool."""
    return DeviceSet("device", tuple(range(num_devices)))


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
    """A value of the placement block, as the recipe writes it."""
    return str(where) if isinstance(where, (str, int)) else f"[{', '.join(map(str, where))}]"


def example(num_devices: int, num_train: int | None = None) -> str:
    """A placement that gives train the first `num_train` devices (None = half of them) and rollout the others."""
    if num_devices == 1:
        return "placement={train: 0, rollout: 0}"
    half = num_devices // 2 if num_train is None else num_train
    return f"placement={{train: {spell(range(half))}, rollout: {spell(range(half, num_devices))}}}"


# The same layout on another number of devices


def scaled(placement: Mapping[str, object], num_devices: int) -> dict[str, object]:
    """The same layout on `num_devices`: device sets in proportion, at least one device each, none idle.

    Entries such as `in train` are kept. With too few devices for the layout, the result names devices that the pool
    does not have, and the check refuses it with the number that the layout needs.
    """
    device_sets = _named_device_sets(placement)
    blocks = sorted(set(device_sets.values()), key=lambda device_set: device_set.indices)
    ranges = _proportional([len(block) for block in blocks], max(num_devices, len(blocks)))
    shares = dict(zip(blocks, ranges, strict=True))
    return {
        role: spell(shares[device_sets[role]]) if role in device_sets else place for role, place in placement.items()
    }


def num_device_sets(placement: Mapping[str, object]) -> int:
    """The number of different device sets, which is the fewest devices that a layout can have."""
    return len(set(_named_device_sets(placement).values())) or 1


def num_named(placement: Mapping[str, object]) -> int:
    """The number of devices that a layout names."""
    return len({index for device_set in _named_device_sets(placement).values() for index in device_set.indices}) or 1


def _named_device_sets(placement: Mapping[str, object]) -> dict[str, DeviceSet]:
    """The device sets of roles placed by number. Empty if one cannot be read, which the check reports."""
    try:
        return {
            role: device_set_at(role, place, MAX_DEVICES) for role, place in placement.items() if _is_numbered(place)
        }
    except ConfigError:
        return {}


def _is_numbered(place: object) -> TypeGuard[Where]:
    if isinstance(place, str):
        return place[:1].isdigit()
    return isinstance(place, (int, list, tuple)) and not isinstance(place, bool)


def _proportional(sizes: Sequence[int], total: int) -> list[range]:
    """Consecutive ranges of `total` devices in the proportion of `sizes`, at least one device each."""
    if not sizes:
        return []
    bounds = [round(sum(sizes[:i]) * total / sum(sizes)) for i in range(len(sizes) + 1)]
    for i in range(1, len(sizes)):
        bounds[i] = max(bounds[i], bounds[i - 1] + 1)
    for i in range(len(sizes) - 1, 0, -1):
        bounds[i] = min(bounds[i], bounds[i + 1] - 1)
    return [range(low, high) for low, high in pairwise(bounds)]
