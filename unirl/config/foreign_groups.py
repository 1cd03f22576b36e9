"""The node groups of RLinf (`cluster.node_groups`), and the `node_groups` to write for them here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unirl.config.device_sets import spell
from unirl.config.errors import InvalidValueError
from unirl.config.merge import get
from unirl.config.node_groups import CPU_HARDWARE, LABEL, RESERVED, SET_BY_RAY
from unirl.config.ranks import rank_items

OTHER_NODES = "nodes-"
"""The beginning of a label that RLinf allows and a placement here would read as a device or as another word."""


@dataclass(frozen=True)
class ForeignGroup:
    """A group of nodes of RLinf."""

    label: str
    nodes: tuple[int, ...]
    block: Mapping[str, object]

    @property
    def own_label(self) -> str:
        """The label here, which begins with a letter."""
        is_ours = LABEL.fullmatch(self.label) and self.label not in RESERVED
        return self.label if is_ours else f"{OTHER_NODES}{self.label}"

    @property
    def places_by_node(self) -> bool:
        """True if the ranks of a placement count nodes, not hardware."""
        return self.block.get("ignore_hardware") is True

    def settings(self, devices_per_node: int) -> dict[str, object]:
        """The group as a recipe here writes it."""
        hardware = {"hardware": CPU_HARDWARE} if self.places_by_node else {}
        nodes: object = self.nodes[0] if len(self.nodes) == 1 else spell(self.nodes)
        return {"nodes": nodes, "devices_per_node": devices_per_node} | hardware | self._environment()

    def _environment(self) -> dict[str, object]:
        """The variables and the interpreter that all of its nodes have."""
        env_vars: dict[str, str] = {}
        interpreter: dict[str, object] = {}
        for config in self._configs():
            if self._covers(config):
                env_vars |= {name: value for name, value in variables_of(config) if name not in SET_BY_RAY}
                if path := config.get("python_interpreter_path"):
                    interpreter = {"python_interpreter_path": str(path)}
        return ({"env_vars": env_vars} if env_vars else {}) | interpreter

    def notes(self, is_written: bool) -> Iterator[str]:
        """What has no counterpart here.

        Args:
            is_written: True if the answer has this group in its `node_groups`.
        """
        if self.own_label != self.label and is_written:
            yield f"{self.label}: the group is named {self.own_label}, because a label here begins with a letter"
        if self.block.get("hardware") is not None:
            kind = get(dict(self.block), "hardware.type", self.block["hardware"])
            yield (
                f"{self.label}: hardware={kind} is no GPU; start an environment server on its nodes "
                "(python -m unirl.envs.serve) and name it in pipeline.env"
            )
        for config in self._configs():
            left_out = [
                (name, value)
                for name, value in variables_of(config)
                if name in SET_BY_RAY or not (is_written and self._covers(config))
            ]
            path = None if is_written and self._covers(config) else config.get("python_interpreter_path")
            if left_out or path:
                nodes = config.get("node_ranks", "all")
                yield f"{self.label}: before `ray start` on nodes {nodes}: {_shell(left_out, path)}"

    def _configs(self) -> list[Mapping[str, object]]:
        value = self.block.get("env_configs")
        items = [] if value is None else value
        path = f"cluster.node_groups ({self.label}).env_configs"
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, Mapping) for item in items):
            raise InvalidValueError(
                f"{path}={value} must be a list of blocks with node_ranks, env_vars, python_interpreter_path"
            )
        return list(items)

    def _covers(self, config: Mapping[str, object]) -> bool:
        """True if a block of `env_configs` is for all nodes of the group."""
        if config.get("node_ranks", "all") == "all":
            return True
        items = rank_items(f"cluster.node_groups ({self.label}).env_configs.node_ranks", config["node_ranks"], "ranks")
        return {*self.nodes} <= {rank for item in items for rank in item.resources}


def variables_of(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """The environment variables of a block of `env_configs`, which lists mappings."""
    value = config.get("env_vars")
    items = [value] if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else []
    return [(str(name), str(text)) for item in items if isinstance(item, Mapping) for name, text in item.items()]


def _shell(variables: Iterable[tuple[str, str]], interpreter: object) -> str:
    """The environment of a node as a shell sets it. Workers of Ray have the environment of `ray start`."""
    words = [f"export {name}={value}" for name, value in variables]
    if interpreter:
        words.append(f"use the `ray` of {interpreter}, which then runs the workers of the node")
    return "; ".join(words)


def written_groups(
    groups: Mapping[str, ForeignGroup], devices: Mapping[str, Sequence[int]], notes: list[str]
) -> dict[str, object] | None:
    """The `node_groups` for groups whose nodes have equally many of their devices. None if one has not.

    Args:
        devices: label -> its devices that a role uses.
        notes: gets a note for a group that cannot be written.
    """
    written: dict[str, object] = {}
    for label, used in devices.items():
        group = groups[label]
        if len(used) % len(group.nodes):
            notes.append(
                f"{label}: {len(used)} devices are not spread equally over {len(group.nodes)} nodes. Write one entry "
                "of node_groups for the nodes of each size"
            )
            return None
        written[group.own_label] = group.settings(len(used) // len(group.nodes))
    return written


def place_of(used: Sequence[int], groups: Mapping[str, ForeignGroup], devices: Mapping[str, Sequence[int]]) -> str:
    """Devices as a placement writes them: a label, ranks of one, or numbers where they are in several groups."""
    for label, own in devices.items():
        if set(used) <= set(own):
            ranks = [own.index(device) for device in used]
            name = groups[label].own_label
            return name if len(ranks) == len(own) else f"{name}:{spell(ranks)}"
    return spell(used)
