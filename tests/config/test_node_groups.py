"""Groups of nodes: labels stand for devices, and mistakes are refused with what is there."""

import pytest

from unirl.cli.plan import hardware_text
from unirl.config.errors import UniRLError
from unirl.config.load import load
from unirl.config.node_groups import NodeGroup, devices_of_groups, node_of_device, numbered
from unirl.plan.auto_placement import MeasuredStep, best_placements
from unirl.plan.devices import device_named
from unirl.plan.layout import check_layout, transport_of
from unirl.plan.placement import plan_of
from unirl.plan.simulate import PhaseSeconds

SEPARATE = "diffusion/sd3_replica_lora_separate"
GROUPS = "node_groups={gpus: {nodes: 0-1, devices_per_node: 2}, hosts: {nodes: 2, devices_per_node: 4, hardware: cpu}}"
PLACED = "placement={train: gpus, rollout: 'hosts:0-1', reward: 'hosts:2-3'}"


def plan(*words: str):
    config = load(SEPARATE, ["num_devices=8", GROUPS, PLACED, *words]).config
    found = plan_of(config)
    check_layout(config, found)
    return found


def test_a_label_is_the_devices_of_its_nodes_in_the_order_of_the_block():
    placed = plan()
    assert (placed.train.indices, placed.rollout.indices, placed.reward.indices) == ((0, 1, 2, 3), (4, 5), (6, 7))
    assert placed.relation == "separate"
    assert "rollout on devices 4-5 (hosts)" in placed.describe()


def test_every_device_is_on_the_node_that_counting_by_hand_gives():
    groups = {"a": NodeGroup(nodes="4,1", devices_per_node=2), "b": NodeGroup(nodes=0, devices_per_node=3)}
    assert devices_of_groups(groups) == {"a": range(4), "b": range(4, 7)}
    assert [node_of_device(groups, index) for index in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert numbered({"train": "a", "rollout": "b:0,2", "reward": "cpu x2"}, groups) == {
        "train": "0-3",
        "rollout": "4,6",
        "reward": "cpu x2",
    }


def test_the_plan_says_who_works_where_in_each_phase():
    rows = {(label, devices): by_phase for label, _, devices, by_phase in plan().rows_of_nodes()}
    assert rows["gpus", "devices 0-3"] == {"sync": "train", "generate": "-", "reward": "-", "train": "train"}
    assert rows["hosts", "devices 4-5"] == {"sync": "rollout", "generate": "rollout", "reward": "-", "train": "-"}
    assert rows["hosts", "devices 6-7"] == {"sync": "-", "generate": "-", "reward": "reward", "train": "-"}


def test_toy_scale_keeps_the_parts_of_each_group_on_one_node_each(tmp_path):
    recipe = tmp_path / "grouped.yaml"
    blocks = "\n".join(word.replace("=", ": ", 1) for word in (GROUPS, PLACED))
    recipe.write_text(f"# @package _global_\ndefaults: [{SEPARATE}, _self_]\nnum_devices: 8\n{blocks}\n")
    config = load(str(recipe), ["scale=toy"]).config
    placed = plan_of(config)
    assert (placed.train.indices, placed.rollout.indices, placed.reward.indices) == ((0,), (1,), (2,))
    assert config.runtime_in_use == "local"
    assert {label: group.size for label, group in (config.node_groups or {}).items()} == {"gpus": 1, "hosts": 1}


MISTAKES = [
    ("placement.rollout=hots", 2003, "Did you mean 'hosts'? node_groups: gpus, hosts"),
    ("+placement.env=hosts", 2003, "Write rollout: hosts"),
    ("placement.rollout='hosts:0-9'", 2010, "names device 9 of hosts, which has 4"),
    ("placement.rollout='hosts:x'", 2004, "    x\n    ^"),
    (
        "placement={train: gpus, rollout: gpus, reward: in train}",
        2010,
        "devices 4-7 of the groups of nodes (hosts) without a role",
    ),
    ("placement.rollout='gpus:0-1'", 2010, "share only 0-1"),
    ("num_devices=4", 2010, "Set num_devices=8"),
    ("devices_per_node=2", 2010, "Leave it out"),
    ("node_groups.hosts={nodes: 1, hardware: null}", 2010, "node 1 is in gpus and in hosts"),
    ("node_groups.hosts.nodes='2,2'", 2010, "names a node twice"),
    ("node_groups.hosts.nodes=null", 2004, "nodes (ranks such as 0-3) or labels"),
    ("node_groups.hosts.env_vars={CUDA_VISIBLE_DEVICES: 1}", 2004, "Leave it out"),
    ("node_groups.hosts.python_interpreter_path=python", 2004, "absolute path"),
    ("node_groups.hosts.node=2", 2003, "Did you mean 'node_groups.hosts.nodes'?"),
    ("+node_groups.rest={nodes: 5}", 2004, "Rename the group"),
    ("sync.transport=broadcast", 2020, "Set sync.transport=ray"),
    ("row_transport=collective", 2020, "Set row_transport=object_store"),
]


@pytest.mark.parametrize(("word", "code", "says"), MISTAKES)
def test_a_mistake_names_what_is_there_and_the_way_out(word, code, says):
    words = ["num_devices=9", word] if "node_groups.rest" in word else [word]
    words += ["node_groups.gpus.hardware=H100"] if "transport" in word else []
    with pytest.raises(UniRLError) as caught:
        plan(*words)
    assert (caught.value.code, says in str(caught.value)) == (code, True), str(caught.value)


def test_cpu_nodes_get_the_weights_of_gpus_through_ray():
    for words, transport in (((), "broadcast"), (("node_groups.gpus.hardware=H100",), "ray")):
        config = load(SEPARATE, ["num_devices=8", GROUPS, PLACED, *words]).config
        assert transport_of(config, plan(*words)) == transport


def test_devices_that_differ_are_not_searched_and_not_counted_alike():
    h100, _ = device_named("h100")
    assert hardware_text(plan(), h100) == ["memory and time count every device as h100, also those of hosts (cpu)"]
    assert hardware_text(plan("node_groups.hosts.hardware=H100"), h100) == []
    recipe = load(SEPARATE, ["num_devices=8", GROUPS, PLACED])
    measured = MeasuredStep(
        seconds=PhaseSeconds(generate=4.0, score=1.0, train=2.0), num_rows=256, num_train=4, num_rollout=2, num_reward=2
    )
    with pytest.raises(UniRLError, match="Search with node_groups=null"):
        best_placements(recipe, [], measured, 8, h100)


def test_a_label_without_groups_is_refused():
    with pytest.raises(UniRLError, match="write node_groups"):
        plan_of(load(SEPARATE, ["placement={train: gpus, rollout: 4-7}"]).config)
