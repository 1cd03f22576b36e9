"""Placements of VRL and RLinf, and the placement to write for them here.

VRL gives every role a number of GPUs (`distributed.resources`), RLinf gives it ranks of resources of a group of nodes
(`cluster`). `unirl config import FILE` prints the block for a file, and a recipe with one of these blocks is refused
with the line to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unirl.config.device_sets import spell
from unirl.config.errors import ConfigError, GeometryError, InvalidValueError, did_you_mean
from unirl.config.foreign_groups import ForeignGroup, place_of, written_groups
from unirl.config.merge import Tree
from unirl.config.ranks import rank_items
from unirl.config.recipe import MAX_DEVICES

VRL, RLINF = "distributed", "cluster"
"""The top-level block of each framework."""
VRL_RESOURCES = ("trainer", "rollout", "visible_devices", "allow_overlap")
VRL_ROLE = ("num_gpus", "num_workers", "devices")
RLINF_KEYS = ("num_nodes", "component_placement", "node_groups", "auto_scheduler", "ray")
RLINF_GROUP = ("label", "node_ranks", "env_configs", "hardware", "ignore_hardware")
ROLE_OF = {"actor": "train", "rollout": "rollout", "env": "rollout", "reward": "reward"}
"""A component of RLinf to the role that does its work. Environments live in the processes of the engine."""
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|~)$)[A-Za-z0-9_/.-][A-Za-z0-9_/. -]*", re.IGNORECASE)
"""Text that YAML's flow style reads as this text, without quotes."""
RANKS = "ranks such as 0-3, 0,2 or 0-1:0-3, or all"
INSIDE = {"inference": "train", "critic": "train", "agent": "rollout"}
"""A component of RLinf without a role of its own to the role in whose processes its work is done."""


@dataclass(frozen=True)
class ForeignPlacement:
    """The settings to write in a recipe, and what they leave out."""

    settings: Mapping[str, object]
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The settings as words of a command line."""
        return [f"{key}={flow(value)}" for key, value in self.settings.items()]

    @property
    def block(self) -> str:
        """The settings as YAML, each note as a comment."""
        lines = [f"{key}: {flow(value)}" for key, value in self.settings.items()]
        return "\n".join([*lines, *(f"# {note}" for note in self.notes)])


def flow(value: object) -> str:
    """A value in YAML's flow style, which is that of Hydra, too: `{train: 0-3, rollout: rest}`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return json.dumps(value)
    return str(value)


def refuse_foreign_placement(tree: Tree) -> None:
    """Refuses the blocks of VRL and RLinf, with the line to write instead.

    Raises:
        ConfigError: 2003, or 2004 and 2010 for a block that cannot be read.
    """
    for block, owner in ((VRL, "VRL"), (RLINF, "RLinf")):
        if block in tree:
            known = tree.get("num_devices")
            found = import_placement({block: tree[block]}, known if type(known) is int else None)
            notes = "".join(f"\n  {note}" for note in found.notes)
            answer = f"Write {' '.join(found.words)}" if found.words else "Leave it out"
            raise ConfigError(f"{block}: {owner} places its roles with this block. {answer}{notes}")


def import_placement(tree: Mapping[str, object], num_devices: int | None = None) -> ForeignPlacement:
    """The placement to write for a configuration of VRL or RLinf.

    Args:
        num_devices: the devices that there are, where the file does not say it.

    Raises:
        ConfigError: 2003 for no such block or an unknown key, 2004 for a value that cannot be read, 2010 for counts.
    """
    if VRL in tree:
        resources = _mapping(VRL, tree[VRL]).get("resources", {})
        return _from_vrl(_mapping(f"{VRL}.resources", resources))
    if RLINF in tree:
        return _from_rlinf(_mapping(RLINF, tree[RLINF]), num_devices)
    raise ConfigError(
        f"the file has neither distributed.resources (VRL) nor cluster (RLinf); its keys: {', '.join(tree) or 'none'}"
    )


def _mapping(path: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"{path}={value} must be a block of keys")
    return {str(key): item for key, item in value.items()}


def _check_keys(path: str, block: Mapping[str, object], known: Sequence[str]) -> None:
    for key in block:
        if key not in known:
            raise ConfigError(f"{path}.{key}: unknown key.{did_you_mean(key, known)} Keys: {', '.join(known)}")


def _count(path: str, value: object) -> int:
    if type(value) is not int or not 0 < value <= MAX_DEVICES:
        raise InvalidValueError(f"{path}={value} must be a whole number from 1 to {MAX_DEVICES}")
    return value


# VRL


def _from_vrl(resources: Mapping[str, object]) -> ForeignPlacement:
    _check_keys("distributed.resources", resources, VRL_RESOURCES)
    trainer = _mapping("distributed.resources.trainer", resources.get("trainer", {}))
    rollout = _mapping("distributed.resources.rollout", resources.get("rollout", {}))
    _check_keys("distributed.resources.trainer", trainer, VRL_ROLE)
    _check_keys("distributed.resources.rollout", rollout, VRL_ROLE)
    visible = _devices("distributed.resources.visible_devices", resources.get("visible_devices"))
    pinned = [
        _devices(f"distributed.resources.{name}.devices", role.get("devices"))
        for name, role in (("trainer", trainer), ("rollout", rollout))
    ]
    if all(pinned):
        return _pinned(visible, *pinned)
    if any(pinned):
        raise ConfigError(
            "distributed.resources: one role names its devices and the other does not. Name trainer.devices and "
            "rollout.devices, or neither"
        )
    train = _count("distributed.resources.trainer.num_gpus", trainer.get("num_gpus", 1))
    total = len(visible) or None
    wanted = rollout.get("num_gpus", rollout.get("num_workers", "auto"))
    notes = _worker_notes(wanted, rollout.get("num_workers")) + _visible_notes(visible)
    placement: dict[str, object] = {"train": spell(range(train))}
    if wanted == "auto":
        placement["rollout"] = "rest"
        if total is not None and total <= train:
            raise GeometryError(
                f"distributed.resources.visible_devices names {total} devices, trainer.num_gpus={train} takes all of "
                "them, and rollout.num_gpus=auto gets none. Name more devices, or give the trainer fewer"
            )
    else:
        sampling = _count("distributed.resources.rollout.num_gpus", wanted)
        shared = resources.get("allow_overlap") is True
        first = 0 if shared else train
        placement["rollout"] = spell(range(first, first + sampling))
        total = max(train, first + sampling)
    settings = {"placement": placement} | ({} if total is None else {"num_devices": total})
    return ForeignPlacement(settings, notes)


def _pinned(visible: Sequence[int], train: Sequence[int], rollout: Sequence[int]) -> ForeignPlacement:
    """The placement for physical devices, which are numbered here in the order of CUDA_VISIBLE_DEVICES."""
    everything = visible or sorted({*train, *rollout})
    for device in (*train, *rollout):
        if device not in everything:
            raise GeometryError(
                f"distributed.resources names device {device}, and visible_devices={list(everything)} does not. "
                "Add it there, or name another device"
            )
    place = {device: index for index, device in enumerate(everything)}
    names = {
        role: spell(sorted(place[device] for device in devices))
        for role, devices in (("train", train), ("rollout", rollout))
    }
    return ForeignPlacement({"placement": names, "num_devices": len(everything)}, _visible_notes(everything))


def _devices(path: str, value: object) -> list[int]:
    """The physical devices of a list. Empty without one."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(type(item) is int and item >= 0 for item in value):
        raise InvalidValueError(f"{path}={value} must be a list of devices, such as [0, 1]")
    return list(value)


def _visible_notes(visible: Sequence[int]) -> tuple[str, ...]:
    """A note for a list of physical devices other than the first ones."""
    if not visible or list(visible) == list(range(len(visible))):
        return ()
    listed = ",".join(map(str, visible))
    return (f"start it with CUDA_VISIBLE_DEVICES={listed}: placement counts the devices that this variable shows",)


def _worker_notes(num_gpus: object, num_workers: object) -> tuple[str, ...]:
    if num_workers is None or num_workers == num_gpus or num_gpus == "auto":
        return ()
    return (f"rollout.num_workers={num_workers}: every device of an engine has one worker here, so it has {num_gpus}",)


# RLinf


@dataclass(frozen=True)
class _Component:
    """The place of a component of RLinf: ranks of the resources of a group of nodes."""

    name: str
    group: str
    ranks: tuple[int, ...] | None  # None = all
    num_processes: int | None


def _from_rlinf(cluster: Mapping[str, object], num_devices: int | None) -> ForeignPlacement:
    _check_keys(RLINF, cluster, RLINF_KEYS)
    num_nodes = _count("cluster.num_nodes", cluster.get("num_nodes", 1))
    groups = _groups(cluster.get("node_groups"), num_nodes)
    entries = _mapping("cluster.component_placement", cluster.get("component_placement", {}))
    components = [part for key, place in entries.items() for part in _components(key, place, groups)]
    notes: list[str] = []
    on_hosts = [part for part in components if part.group == "node"]
    on_devices = _beside_rollout([part for part in components if part.group != "node"], notes)
    devices = _devices_of(on_devices, groups, num_devices, num_nodes, notes)
    sets: dict[str, set[int]] = {}
    for part in on_devices:
        role, own = ROLE_OF.get(part.name), devices[part.group]
        if role is None:
            notes.append(_inside(part.name))
            continue
        sets.setdefault(role, set()).update(own if part.ranks is None else (own[rank] for rank in part.ranks))
        if part.ranks is not None and part.num_processes not in (None, len(part.ranks)):
            notes.append(
                f"{part.name}: {part.num_processes} processes on {len(part.ranks)} devices; here every device has one"
            )
    places = _shared_or_apart(sets, notes)
    used = {index for indices in sets.values() for index in indices}
    settings: dict[str, object] = {}
    written: Mapping[str, object] | None = None
    if used and groups and "cluster" not in devices:
        number = {index: position for position, index in enumerate(sorted(used))}
        own_devices = {label: [number[index] for index in own if index in used] for label, own in devices.items()}
        own_devices = {label: own for label, own in own_devices.items() if own}
        written = written_groups(groups, own_devices, notes)
    if written is not None:
        placement: dict[str, object] = {
            role: place_of(indices, groups, own_devices) for role, indices in places.items()
        }
        settings = {"node_groups": written}
    else:
        placement = {role: spell(indices) for role, indices in places.items()} if used else dict.fromkeys(sets, "all")
    for part in on_hosts:
        placement |= _on_host(part, num_nodes, notes)
    if placement:
        settings["placement"] = placement
    if used:
        settings["num_devices"] = len(used)
    if written is None:
        settings |= _per_node(len(used), num_nodes, groups, on_devices)
    if not components:
        settings |= _nodes_alone(num_nodes, num_devices, notes)
    elif placement and not used:
        notes.append("set num_devices to the number of devices of all nodes together")
    about = [note for label, group in groups.items() for note in group.notes(group.own_label in (written or ()))]
    return ForeignPlacement(settings, (*notes, *about))


def _beside_rollout(parts: Sequence[_Component], notes: list[str]) -> list[_Component]:
    """The components without environments that are on other nodes than the rollout, in whose processes they run."""
    rollouts = {part.group for part in parts if part.name == "rollout"}
    kept = []
    for part in parts:
        if part.name == "env" and rollouts and part.group not in rollouts:
            notes.append(
                f"env: environments run in the processes of the rollout. For those on the nodes of {part.group}, start "
                "python -m unirl.envs.serve RECIPE there and set pipeline.env to unirl.envs.remote.RemoteEnvironment"
            )
            continue
        if part.name == "env":
            notes.append("env: environments run in the processes of the engine (pipeline.env)")
        kept.append(part)
    return kept


def _devices_of(
    parts: Sequence[_Component],
    groups: Mapping[str, ForeignGroup],
    num_devices: int | None,
    num_nodes: int,
    notes: list[str],
) -> dict[str, range]:
    """The devices of each group that a component is on, numbered group by group."""
    sizes: dict[str, int] = {}
    for part in parts:
        size = 0 if part.ranks is None else max(part.ranks) + 1
        sizes[part.group] = max(sizes.get(part.group, 0), size)
    for label, size in sizes.items():
        if size == 0 and label in groups:
            nodes = len(groups[label].nodes)
            per_node = 1 if groups[label].places_by_node or num_devices is None else num_devices // num_nodes
            sizes[label] = max(per_node, 1) * nodes
            if not groups[label].places_by_node and num_devices is None:
                notes.append(f"{label}: set devices_per_node to the GPUs of each of its nodes, and num_devices to all")
        elif size == 0 and len(sizes) == 1:
            sizes[label] = num_devices or 0
    ranges: dict[str, range] = {}
    first = 0
    for label, size in sizes.items():
        ranges[label] = range(first, first + size)
        first += size
    return ranges


def _per_node(
    used: int, num_nodes: int, groups: Mapping[str, ForeignGroup], parts: Sequence[_Component]
) -> dict[str, object]:
    """The devices of each node, if several nodes have devices and share them equally."""
    named = {part.group for part in parts} & set(groups)
    nodes = {rank for name in named for rank in groups[name].nodes} or set(range(num_nodes))
    return {"devices_per_node": used // len(nodes)} if len(nodes) > 1 and used and used % len(nodes) == 0 else {}


def _nodes_alone(num_nodes: int, num_devices: int | None, notes: list[str]) -> dict[str, object]:
    """The settings of a number of nodes on which no component is placed."""
    notes.append("component_placement is absent: without placement, every role shares every device")
    if num_nodes > 1 and num_devices is not None and num_devices % num_nodes == 0:
        return {"num_devices": num_devices, "devices_per_node": num_devices // num_nodes}
    if num_nodes > 1:
        notes.append("set num_devices to the devices of all nodes together, and devices_per_node to those of each")
    return {}


def _groups(value: object, num_nodes: int) -> dict[str, ForeignGroup]:
    """The groups of nodes by label."""
    items = [] if value is None else value
    if not isinstance(items, (list, tuple)):
        raise InvalidValueError(f"cluster.node_groups={value} must be a list of groups, each with label and node_ranks")
    groups: dict[str, ForeignGroup] = {}
    for index, item in enumerate(items):
        path = f"cluster.node_groups[{index}]"
        group = _mapping(path, item)
        _check_keys(path, group, RLINF_GROUP)
        label = str(group.get("label", ""))
        if not label or label in groups or label in ("cluster", "node"):
            raise InvalidValueError(
                f"{path}.label={label} must be a name of its own; cluster and node are those of RLinf itself"
            )
        groups[label] = ForeignGroup(label, tuple(_node_ranks(label, group, num_nodes)), group)
    return groups


def _node_ranks(label: str, group: Mapping[str, object], num_nodes: int) -> list[int]:
    """The nodes of a group."""
    key = f"cluster.node_groups ({label}).node_ranks"
    if group.get("node_ranks", "all") == "all":
        return list(range(num_nodes))
    ranks = [rank for item in rank_items(key, group["node_ranks"], RANKS) for rank in item.resources]
    if max(ranks) >= num_nodes:
        raise GeometryError(
            f"{key}={group['node_ranks']} names node {max(ranks)}, and cluster.num_nodes={num_nodes} has only nodes 0 "
            f"to {num_nodes - 1}. Set num_nodes={max(ranks) + 1}, or name nodes of the cluster"
        )
    return ranks


def _components(key: str, place: object, groups: Mapping[str, object]) -> Iterator[_Component]:
    """The components that one line places, such as `actor,rollout: 0-7`."""
    path, group = f"cluster.component_placement.{key}", "cluster"
    if isinstance(place, Mapping):
        block = _mapping(path, place)
        _check_keys(path, block, ("node_group", "placement"))
        group, place = str(block.get("node_group", "cluster")), block.get("placement", "all")
    if group not in ("cluster", "node", *groups):
        known = ("cluster", "node", *groups)
        raise ConfigError(f"{path}.node_group={group}: there is no such group.{did_you_mean(group, known)}")
    ranks: tuple[int, ...] | None = None
    num_processes: int | None = None
    if str(place) != "all":
        items = rank_items(path, place, RANKS, takes_processes=True)
        ranks = tuple(rank for item in items for rank in item.resources)
        if len(set(ranks)) < len(ranks):
            raise GeometryError(f"{path}={place} names a rank twice")
        if any(item.processes is not None for item in items):
            num_processes = sum(len(item.processes or item.resources) for item in items)
    for name in key.split(","):
        yield _Component(name.strip(), group, ranks, num_processes)


def _shared_or_apart(sets: Mapping[str, set[int]], notes: list[str]) -> dict[str, list[int]]:
    """The devices of the roles, of which two share all of their devices or none, numbered from 0 without gaps."""
    merged = {role: set(indices) for role, indices in sets.items()}
    for _ in merged:  # a union may meet a third role
        for role, indices in merged.items():
            for other in merged.values():
                if indices & other and indices != other:
                    notes.append(f"{role} shares some devices with another role; here they share all of them, in turns")
                    union = indices | other
                    indices.update(union)
                    other.update(union)
    used = sorted({index for indices in merged.values() for index in indices})
    number = {index: position for position, index in enumerate(used)}
    return {role: sorted(number[index] for index in indices) for role, indices in merged.items()}


def _on_host(part: _Component, num_nodes: int, notes: list[str]) -> dict[str, object]:
    """The place of a component that has no devices: CPU processes, which only the reward can have."""
    role = ROLE_OF.get(part.name)
    if role == "reward":
        count = part.num_processes or (num_nodes if part.ranks is None else len(part.ranks))
        return {"reward": "cpu" if count == 1 else f"cpu x{count}"}
    notes.append(
        "env: environments run in the processes of the engine (pipeline.env)"
        if part.name == "env"
        else f"{part.name}: only the reward runs outside the devices here"
    )
    return {}


def _inside(name: str) -> str:
    where = INSIDE.get(name)
    return f"{name}: part of {where} here" if where else f"{name}: there is no such role here"
