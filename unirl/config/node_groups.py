"""Groups of nodes: which nodes of a Ray cluster belong to a label, and the devices that the label stands for.

    node_groups:
      train: {nodes: 0-1, devices_per_node: 8, hardware: H100}
      env: {nodes: 2-3, devices_per_node: 4, hardware: cpu, env_vars: {MUJOCO_GL: egl}}
    placement: {train: train, rollout: "env:0-3", reward: "env:4-7"}

Devices are numbered group by group, in the order of the block: `train` has the devices 0-15, and `env` 16-23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from unirl.config.errors import ConfigError, GeometryError, InvalidValueError, did_you_mean
from unirl.config.ranks import rank_items

CPU_HARDWARE = "cpu"
LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
RESERVED = ("all", "rest", "cpu", "cluster", "node")
"""Words that mean something else in a placement, here or in RLinf."""
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS")
"""Variables that a worker gets from its place."""
NODES = "ranks of nodes such as 0-3, 0,2 or 3"


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of a Ray cluster under one label, on which roles are placed."""

    nodes: str | int | tuple[int, ...] | None = None
    """Ranks of its nodes: `0-3`, `0,2`, `3` or `[0, 2]`. Each node sets UNIRL_NODE_RANK before `ray start`."""
    labels: dict[str, str] | None = None
    """Instead of `nodes`: labels that its nodes have, given by `ray start --labels=KEY=VALUE`."""
    num_nodes: Annotated[int, Meta(ge=1)] = 1
    """The number of nodes with these labels. Ranks in `nodes` count themselves."""
    devices_per_node: Annotated[int, Meta(ge=1)] = 1
    """Devices that each node gives to the run: GPUs, or CPU processes."""
    hardware: str | None = None
    """cpu = a device is a CPU process; gpu = a GPU of any kind; another word = GPUs of this kind, as Ray names it, such
    as H100; absent = GPUs where the nodes of the group have any, else CPU processes."""
    env_vars: dict[str, str | int] | None = None
    """Environment variables of the workers on these nodes."""
    python_interpreter_path: str | None = None
    """The Python that runs the workers on these nodes, with the same versions of Python and Ray; absent = that of
    `ray start` there."""

    def __post_init__(self) -> None:
        if (self.nodes is None) == (not self.labels):
            raise ValueError("a group has nodes (ranks such as 0-3) or labels (KEY: VALUE of ray start), and not both")
        for name in self.env_vars or {}:
            if name in SET_BY_RAY:
                raise ValueError(f"env_vars.{name}: a worker gets {name} from its place. Leave it out")
        path = self.python_interpreter_path
        if path is not None and (not path.startswith("/") or any(sign.isspace() for sign in path)):
            raise ValueError(f"python_interpreter_path={path} must be an absolute path without spaces, as Ray needs it")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of its nodes. Empty for a group that is chosen by labels."""
        if self.nodes is None:
            return ()
        texts = [str(item) for item in self.nodes] if isinstance(self.nodes, tuple) else [str(self.nodes)]
        return tuple(
            rank for text in texts for item in rank_items("node_groups.nodes", text, NODES) for rank in item.resources
        )

    @property
    def size(self) -> int:
        """The number of its nodes."""
        return len(self.ranks) or self.num_nodes

    @property
    def num_devices(self) -> int:
        """The devices of all of its nodes."""
        return self.size * self.devices_per_node

    @property
    def on_cpu(self) -> bool:
        """True if its devices are CPU processes, whatever its nodes have."""
        return self.hardware == CPU_HARDWARE

    @property
    def words(self) -> str:
        """`nodes 0-1 (H100)` or `2 nodes with gpu=a (cpu)`, for the plan."""
        count = f"node{'s' * (self.size > 1)}"
        chosen = ",".join(f"{key}={value}" for key, value in (self.labels or {}).items())
        which = (
            f"{self.size} {count} with {chosen}"
            if chosen
            else f"{count} {str(self.nodes).strip('()').replace(' ', '')}"
        )
        return f"{which} ({self.hardware})" if self.hardware else which


NodeGroups = Mapping[str, NodeGroup]


def devices_of_groups(groups: NodeGroups) -> dict[str, range]:
    """The devices of each group, numbered in the order of the block."""
    ranges: dict[str, range] = {}
    first = 0
    for label, group in groups.items():
        ranges[label] = range(first, first + group.num_devices)
        first += group.num_devices
    return ranges


def check_groups(groups: NodeGroups, num_devices: int, devices_per_node: int | None) -> None:
    """Checks the groups against each other and against the devices of the pool.

    Raises:
        ConfigError: 2004 for a label or ranks that cannot be read, 2010 for nodes in two groups and for counts.
    """
    owners: dict[tuple[int, bool], str] = {}
    for label, group in groups.items():
        if not LABEL.fullmatch(label) or label in RESERVED:
            raise InvalidValueError(
                f"node_groups.{label}: a label begins with a letter and has letters, digits, '_', '-' and '.', and is "
                f"none of {', '.join(RESERVED)}. Rename the group"
            )
        for rank in group.ranks:
            other = owners.setdefault((rank, group.on_cpu), label)
            if other != label:
                raise GeometryError(
                    f"node_groups: node {rank} is in {other} and in {label}, and its devices would be counted twice. "
                    "Name it in one of them; two groups may share a node only if one of them has hardware: cpu"
                )
        if len(set(group.ranks)) < len(group.ranks):
            raise GeometryError(f"node_groups.{label}.nodes={group.nodes} names a node twice")
    if devices_per_node is not None:
        raise GeometryError(
            f"devices_per_node={devices_per_node} is for a cluster of equal nodes, and this recipe has node_groups, "
            "each with devices_per_node of its own. Leave it out (devices_per_node=null)"
        )
    total = sum(group.num_devices for group in groups.values())
    if num_devices != total:
        raise GeometryError(
            f"num_devices={num_devices}, and the groups of nodes have {total} devices ({listed_groups(groups)}). Set "
            f"num_devices={total}, or change devices_per_node of a group"
        )


def listed_groups(groups: NodeGroups) -> str:
    """`train: 2 nodes x 8 = devices 0-15, env: 1 node x 4 = devices 16-19`, for messages."""
    return ", ".join(
        f"{label}: {groups[label].size} node{'s' * (groups[label].size > 1)} x {groups[label].devices_per_node} = "
        f"{'device' if len(devices) == 1 else 'devices'} {_span(devices)}"
        for label, devices in devices_of_groups(groups).items()
    )


def numbered(placement: Mapping[str, object], groups: NodeGroups) -> dict[str, object]:
    """A placement with device numbers in place of `LABEL` and `LABEL:0-3`, whose ranks count the group's own devices.

    Raises:
        ConfigError: 2003 for a label that is no group, 2004 for ranks that cannot be read, 2010 for ranks beyond it.
    """
    return {role: _numbers(role, place, groups) for role, place in placement.items()}


def _numbers(role: str, place: object, groups: NodeGroups) -> object:
    if not isinstance(place, str):
        return place
    label, colon, ranks = (part.strip() for part in place.partition(":"))
    if not LABEL.fullmatch(label) or (not colon and (label in RESERVED or label.startswith("cpu x"))):
        return place
    if label not in groups:
        known = ", ".join(groups) or "none: write node_groups, or devices such as 0-3"
        raise ConfigError(
            f"placement.{role}={place}: there is no group of nodes {label}.{did_you_mean(label, groups)} "
            f"node_groups: {known}"
        )
    devices = devices_of_groups(groups)[label]
    if not colon or ranks == "all":
        return _span(devices)
    own = [
        rank
        for item in rank_items(f"placement.{role}", ranks, "ranks of the group's devices such as 0-3, or all")
        for rank in item.resources
    ]
    if max(own) >= len(devices):
        raise GeometryError(
            f"placement.{role}={place} names device {max(own)} of {label}, which has {len(devices)} "
            f"(0 to {len(devices) - 1}). Raise node_groups.{label}.devices_per_node, or name devices of the group"
        )
    return ",".join(str(devices[rank]) for rank in own)


def _span(devices: range) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def group_of_device(groups: NodeGroups, index: int) -> str:
    """The label of the group that a device belongs to."""
    return next(label for label, devices in devices_of_groups(groups).items() if index in devices)


def node_of_device(groups: NodeGroups, index: int) -> int:
    """The position of a device's node among the nodes of all groups."""
    bounds = accumulate(group.devices_per_node for _, group, _ in nodes_of_groups(groups))
    return next(position for position, bound in enumerate(bounds) if index < bound)


def nodes_of_groups(groups: NodeGroups) -> Iterator[tuple[str, NodeGroup, int | None]]:
    """Every node of every group in the order of the devices: label, group, and rank (None for one chosen by labels)."""
    for label, group in groups.items():
        for position in range(group.size):
            yield label, group, group.ranks[position] if group.ranks else None


def shrunk(groups: Mapping[str, NodeGroup], sizes: Mapping[str, int]) -> dict[str, dict[str, object]]:
    """The groups with one node each and so many devices, as values of a recipe: for toy scale."""
    small: dict[str, dict[str, object]] = {}
    for label, group in groups.items():
        chosen: dict[str, object] = {"nodes": group.ranks[0]} if group.ranks else {"labels": dict(group.labels or {})}
        small[label] = chosen | {"num_nodes": 1, "devices_per_node": sizes[label]}
    return small
