"""The rank of each node of a Ray cluster: UNIRL_NODE_RANK, which a node sets before `ray start`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.config.errors import ResourceError, StallError

VARIABLES = ("UNIRL_NODE_RANK", "RLINF_NODE_RANK")
"""The variables that are read, the first one that is set."""
ANSWER_S = 60.0
"""Seconds that a node has to start a process that reads its environment."""
WAY = f"On each node, export {VARIABLES[0]}=0, 1, ... (each number once) before `ray start`, and start it again"
ASK_PYTHON = "import ray, sys; print('.'.join(map(str, sys.version_info[:2])), ray.__version__)"


@dataclass(frozen=True)
class ClusterNode:
    """A node of a Ray cluster that is alive."""

    id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    """Those of `ray start --labels`, and Ray's own."""


def live_nodes() -> list[ClusterNode]:
    """The nodes of the cluster that this process is connected to, by address."""
    import ray

    nodes = [
        ClusterNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"], node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.address)


def ask_nodes(questions: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str | None, dict[str, str]]]:
    """The rank that each node's environment has, as text, and what the interpreters there answer.

    Args:
        questions: node id -> paths of interpreters. An answer is `3.11 2.54.0`, or the error that starting it gave.

    Raises:
        StallError: 8001 for a node that does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Nested, so that it travels by value: the node may have no unirl of its own.
    def answer(paths: Sequence[str]) -> tuple[str | None, dict[str, str]]:
        def ask_python(path: str) -> str:
            if not os.access(path, os.X_OK):
                return "there is no such program"
            done = subprocess.run([path, "-c", ASK_PYTHON], capture_output=True, text=True, env={"PATH": os.defpath})
            words = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            return words[-1] if words else f"exit status {done.returncode}"

        rank = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
        return rank, {path: ask_python(path) for path in paths}

    task = ray.remote(num_cpus=0, max_retries=0)(answer)
    asked = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(paths)
        for node, paths in questions.items()
    }
    try:
        return dict(zip(asked, ray.get(list(asked.values()), timeout=ANSWER_S), strict=True))
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        addresses = ", ".join(node.address for node in live_nodes() if node.id in questions)
        raise StallError(
            f"the nodes {addresses} were asked for their rank, and not all answered within {ANSWER_S:g} s: "
            f"{str(error).splitlines()[0]}. Look at the output of `ray start` there"
        ) from error


def own_versions() -> str:
    """The versions of Python and Ray of this process, as an interpreter of a group answers."""
    import ray

    return f"{sys.version_info[0]}.{sys.version_info[1]} {ray.__version__}"


def ranks_of(texts: Mapping[str, str | None]) -> dict[int, str]:
    """Rank to address, for nodes that all have a rank.

    A single node without one has rank 0, since there is nothing to tell apart.

    Args:
        texts: address -> the value of UNIRL_NODE_RANK on the node. None: it is not set.

    Raises:
        ResourceError: 5001 for a missing, an unreadable or a duplicate rank, with the nodes and the way out.
    """
    if len(texts) == 1 and None in texts.values():
        return {0: next(iter(texts))}
    missing = [address for address, text in texts.items() if text is None]
    if missing:
        known = ", ".join(f"{address} has {text}" for address, text in texts.items() if text is not None)
        raise ResourceError(
            f"{VARIABLES[0]} is not set on {len(missing)} of {len(texts)} nodes: {', '.join(missing)}"
            f"{f' ({known})' if known else ''}. {WAY}"
        )
    owners: dict[int, list[str]] = defaultdict(list)
    for address, text in texts.items():
        if text is None or not (text.isascii() and text.isdigit()):
            raise ResourceError(f"{VARIABLES[0]}={text} on {address} is not a rank: 0, 1, ... {WAY}")
        owners[int(text)].append(address)
    for rank, addresses in sorted(owners.items()):
        if len(addresses) > 1:
            raise ResourceError(
                f"{VARIABLES[0]}={rank} is set on {len(addresses)} nodes: {', '.join(addresses)}. {WAY}"
            )
    return {rank: addresses[0] for rank, addresses in sorted(owners.items())}
