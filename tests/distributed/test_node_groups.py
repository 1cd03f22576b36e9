"""Nodes of a cluster: ranks are unique, and a group gets nodes that are alive and have what it names."""

import importlib
import re
from pathlib import Path

import pytest

from unirl.config.errors import ResourceError, UniRLError, UnsupportedEnvironmentError
from unirl.config.node_groups import NodeGroup
from unirl.distributed.group import node_places, node_ranks
from unirl.distributed.group.node_places import bundles_of
from unirl.distributed.group.node_ranks import ClusterNode, own_versions, ranks_of

ROOT = Path(__file__).resolve().parents[2]
NODES = [
    ClusterNode("a", "10.0.0.1", {"GPU": 8.0, "CPU": 64.0, "accelerator_type:H100": 1.0}, {}),
    ClusterNode("b", "10.0.0.2", {"GPU": 4.0, "CPU": 64.0, "accelerator_type:L40S": 1.0}, {"site": "east"}),
    ClusterNode("c", "10.0.0.3", {"CPU": 16.0}, {"site": "east", "ray.io/node-id": "c"}),
]
RANKS = {"a": "0", "b": "2", "c": "1"}
"""Other than the order of the addresses."""


def test_ranks_are_those_that_the_nodes_set():
    assert ranks_of({"10.0.0.1": "1", "10.0.0.2": "0"}) == {0: "10.0.0.2", 1: "10.0.0.1"}
    assert ranks_of({"10.0.0.1": None}) == {0: "10.0.0.1"}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"10.0.0.1": "0", "10.0.0.2": None}, "not set on 1 of 2 nodes: 10.0.0.2 (10.0.0.1 has 0)"),
        ({"10.0.0.1": "1", "10.0.0.2": "1"}, "UNIRL_NODE_RANK=1 is set on 2 nodes: 10.0.0.1, 10.0.0.2"),
        ({"10.0.0.1": "0", "10.0.0.2": "-1"}, "UNIRL_NODE_RANK=-1 on 10.0.0.2 is not a rank"),
    ],
)
def test_a_missing_a_duplicate_and_an_unreadable_rank_are_refused(texts, says):
    with pytest.raises(ResourceError, match=re.escape(says)) as caught:
        ranks_of(texts)
    assert "export UNIRL_NODE_RANK=0, 1, ..." in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "variables", "says"),
    [
        (("0", "1"), {"UNIRL_NODE_RANK": "0"}, None),
        (("0", "0"), {"UNIRL_NODE_RANK": "0"}, "UNIRL_NODE_RANK=0 is set on 2 nodes: 10.0.0.1, 10.0.0.2"),
        (("0", None), {"RLINF_NODE_RANK": "0"}, "not set on 1 of 2 nodes: 10.0.0.2"),
        ((None, None), {}, None),
    ],
)
def test_the_launcher_waits_for_nodes_whose_ranks_are_unique(monkeypatch, texts, variables, says):
    for name in node_ranks.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    rank_problem = importlib.import_module("wait_for_nodes").rank_problem
    monkeypatch.setattr(node_ranks, "live_nodes", lambda: NODES[:2])
    monkeypatch.setattr(node_ranks, "ask_nodes", lambda _: {"a": (texts[0], {}), "b": (texts[1], {})})
    problem = rank_problem()
    assert problem is None if says is None else says in problem


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of three nodes, of which only the answers exist. The interpreter /opt/python is on every node."""
    answer = {"/opt/python": own_versions(), "/opt/old": "3.9 2.1.0"}
    monkeypatch.setattr(node_places, "live_nodes", lambda: NODES)
    monkeypatch.setattr(node_places, "ask_nodes", lambda asked: {node: (RANKS[node], answer) for node in asked})


def test_a_group_gets_the_nodes_of_its_ranks_with_what_its_hardware_counts(cluster):
    found = bundles_of(
        {
            "train": NodeGroup(nodes=0, devices_per_node=8, hardware="H100"),
            "env": NodeGroup(nodes="1,2", devices_per_node=4, hardware="cpu", env_vars={"MUJOCO_GL": "egl", "N": 3}),
            "rollout": NodeGroup(labels={"site": "east"}, devices_per_node=4, python_interpreter_path="/opt/python"),
        }
    )
    assert [(each.address, each.resource, each.count) for each in found] == [
        ("10.0.0.1", "GPU", 8),
        ("10.0.0.3", "CPU", 4),
        ("10.0.0.2", "CPU", 4),
        ("10.0.0.2", "GPU", 4),
    ]
    assert found[1].env_vars == {"MUJOCO_GL": "egl", "N": "3"}
    assert found[3].python == "/opt/python"
    assert found[0].resources == {"GPU": 8.0, "node:10.0.0.1": 0.001}


@pytest.mark.parametrize(
    ("group", "kind", "says"),
    [
        (NodeGroup(nodes=7), ResourceError, "no live node has rank 7; the cluster has 0 (10.0.0.1), 1 (10.0.0.3), 2"),
        (NodeGroup(labels={"site": "west"}), ResourceError, "and the cluster has 0 (10.0.0.1: no labels; 10.0.0.2: si"),
        (NodeGroup(labels={"site": "east"}, num_nodes=3), ResourceError, "the cluster has 2"),
        (
            NodeGroup(nodes=2, hardware="H100"),
            ResourceError,
            "has GPUs of the kind L40S. Write hardware: L40S",
        ),
        (NodeGroup(nodes=1, hardware="gpu"), ResourceError, "10.0.0.3 has no GPU. Write hardware: cpu"),
        (NodeGroup(nodes=2, devices_per_node=8), ResourceError, "10.0.0.2 has 4 GPU slots"),
        (
            NodeGroup(nodes=0, python_interpreter_path="/opt/old"),
            UnsupportedEnvironmentError,
            "3.9 2.1.0. The run",
        ),
    ],
)
def test_a_group_without_its_nodes_says_what_the_cluster_has(cluster, group, kind, says):
    with pytest.raises(UniRLError, match=re.escape(says)) as caught:
        bundles_of({"it": group})
    assert type(caught.value) is kind and "node_groups.it" in str(caught.value)
