"""The node of a Ray cluster for each bundle of a pool whose recipe has groups of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unirl.config.errors import ResourceError, UnsupportedEnvironmentError
from unirl.config.node_groups import CPU_HARDWARE, NodeGroup, NodeGroups, nodes_of_groups
from unirl.distributed.group.node_ranks import WAY, ClusterNode, ask_nodes, live_nodes, own_versions, ranks_of

PIN = 0.001
"""The share of a node's own resource that a bundle takes, which puts it on that node."""
ANY_GPU = "gpu"
ACCELERATOR = "accelerator_type:"
"""Ray's resource for a node with GPUs of a kind, such as `accelerator_type:H100`."""


@dataclass(frozen=True)
class NodeBundle:
    """The devices of a pool on one node."""

    resource: str
    """What a worker takes for a device: "GPU", or "CPU" where a device is a CPU process."""
    count: int
    address: str = ""
    """The node. Empty: any node with so many devices."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    """The interpreter of its workers. None: that of `ray start` on the node."""

    @property
    def resources(self) -> dict[str, float]:
        """What the bundle reserves, as Ray counts it."""
        pin = {f"node:{self.address}": PIN} if self.address else {}
        return {self.resource: float(self.count)} | pin


def bundles_of(groups: NodeGroups) -> list[NodeBundle]:
    """The bundle of every node of every group, in the order of the devices.

    Raises:
        ResourceError: 5001 for a rank or labels that no node has, or a node with too few devices, or of another kind.
        UnsupportedEnvironmentError: 3002 for an interpreter that is not there or has other versions.
    """
    nodes = live_nodes()
    paths = {group.python_interpreter_path for group in groups.values()} - {None}
    answers = ask_nodes({node.id: tuple(sorted(map(str, paths))) for node in nodes})
    ranked = any(group.ranks for group in groups.values())
    by_rank = ranks_of({node.address: answers[node.id][0] for node in nodes}) if ranked else {}
    by_address = {node.address: node for node in nodes}
    taken: set[tuple[str, bool]] = set()
    bundles = []
    for label, group, rank in nodes_of_groups(groups):
        if rank is None:
            node = _labelled(label, group, nodes, taken)
        elif rank in by_rank:
            node = by_address[by_rank[rank]]
        else:
            raise ResourceError(
                f"node_groups.{label}: no live node has rank {rank}; the cluster has "
                f"{', '.join(f'{there} ({address})' for there, address in by_rank.items())}. Name one of these ranks, "
                f"or start the node. {WAY}"
            )
        taken.add((node.address, group.on_cpu))
        _check_interpreter(label, group, node, answers[node.id][1])
        bundles.append(_bundle(label, group, node))
    return bundles


def _labelled(label: str, group: NodeGroup, nodes: Sequence[ClusterNode], taken: set[tuple[str, bool]]) -> ClusterNode:
    wanted = group.labels or {}
    fitting = [node for node in nodes if all(node.labels.get(key) == value for key, value in wanted.items())]
    free = [node for node in fitting if (node.address, group.on_cpu) not in taken]
    if free:
        return free[0]
    there = "; ".join(f"{node.address}: {_own_labels(node) or 'no labels'}" for node in nodes)
    words = ",".join(f"{key}={value}" for key, value in wanted.items())
    raise ResourceError(
        f"node_groups.{label} needs {group.num_nodes} live node{'s' * (group.num_nodes > 1)} with the labels {words}, "
        f"and the cluster has {len(fitting)} ({there}). Start nodes with `ray start --labels={words}`, or change labels"
    )


def _own_labels(node: ClusterNode) -> str:
    return ",".join(f"{key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/"))


def _bundle(label: str, group: NodeGroup, node: ClusterNode) -> NodeBundle:
    has_gpus = node.resources.get("GPU", 0) > 0
    kinds = [name.removeprefix(ACCELERATOR) for name in node.resources if name.startswith(ACCELERATOR)]
    named = group.hardware not in (None, CPU_HARDWARE)
    if named and (not has_gpus or group.hardware not in (ANY_GPU, *kinds)):
        has = f"GPUs of the kind {', '.join(kinds) or 'unknown'}" if has_gpus else "no GPU"
        raise ResourceError(
            f"node_groups.{label}.hardware={group.hardware}: the node {node.address} has {has}. Write "
            f"hardware: {(kinds or [ANY_GPU])[0] if has_gpus else CPU_HARDWARE}, or name other nodes. Ray counts the "
            "GPUs that CUDA_VISIBLE_DEVICES shows where it is started"
        )
    resource = "GPU" if named or (has_gpus and not group.on_cpu) else "CPU"
    number = node.resources.get(resource, 0)
    if number < group.devices_per_node:
        raise ResourceError(
            f"node_groups.{label}.devices_per_node={group.devices_per_node}: the node {node.address} has {number:g} "
            f"{resource} slots. Lower devices_per_node, or start it with `ray start --num-{resource.lower()}s=N`"
        )
    env_vars = {name: str(value) for name, value in (group.env_vars or {}).items()}
    return NodeBundle(resource, group.devices_per_node, node.address, env_vars, group.python_interpreter_path)


def _check_interpreter(label: str, group: NodeGroup, node: ClusterNode, answers: Mapping[str, str]) -> None:
    path = group.python_interpreter_path
    if path is None or answers[path] == own_versions():
        return
    raise UnsupportedEnvironmentError(
        f"node_groups.{label}.python_interpreter_path={path} on {node.address}: {answers[path]}. The run has Python "
        f"and Ray {own_versions()}, and workers need the same. Install them there, or leave the key out"
    )
