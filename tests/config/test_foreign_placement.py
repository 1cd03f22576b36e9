"""Placements of VRL and RLinf are answered with a placement of ours that is legal and gives each role as much."""

import textwrap

import pytest
import yaml

from unirl.cli.config import import_file
from unirl.config.errors import UniRLError
from unirl.config.foreign_placement import import_placement
from unirl.config.load import load
from unirl.plan.placement import plan_of

SEPARATE = "diffusion/sd3_replica_lora_separate"


def of(text: str, num_devices: int | None = None):
    return import_placement(yaml.safe_load(textwrap.dedent(text)), num_devices)


VRL = [
    # The split, on the four visible devices that the preset counts itself.
    (
        "distributed.resources: {trainer: {num_gpus: 1}, rollout: {num_gpus: auto}}",
        {"placement": {"train": "0", "rollout": "rest"}},
    ),
    (
        "distributed.resources: {trainer: {num_gpus: 2}, rollout: {num_gpus: 6, num_workers: 6}}",
        {"placement": {"train": "0-1", "rollout": "2-7"}, "num_devices": 8},
    ),
    (
        "distributed.resources: {visible_devices: [0, 1, 2, 3], trainer: {devices: [0]}, rollout: {devices: [1,2,3]}}",
        {"placement": {"train": "0", "rollout": "1-3"}, "num_devices": 4},
    ),
    (
        "distributed.resources: {visible_devices: [4, 5], trainer: {devices: [4]}, rollout: {devices: [5]}}",
        {"placement": {"train": "0", "rollout": "1"}, "num_devices": 2},
    ),
    (
        "distributed.resources: {visible_devices: [0, 1], trainer: {num_gpus: 1}}",
        {"placement": {"train": "0", "rollout": "rest"}, "num_devices": 2},
    ),
    (
        "distributed.resources: {rollout: {num_gpus: 1, num_workers: 1}}",
        {"placement": {"train": "0", "rollout": "1"}, "num_devices": 2},
    ),
    (
        "distributed.resources: {allow_overlap: true, trainer: {num_gpus: 1}, rollout: {num_gpus: 1}}",
        {"placement": {"train": "0", "rollout": "0"}, "num_devices": 1},
    ),
]


def nested(text: str) -> dict:
    ((_, resources),) = yaml.safe_load(text).items()
    return {"distributed": {"resources": resources}}


@pytest.mark.parametrize(("theirs", "ours"), VRL)
def test_every_way_of_vrl_to_give_devices_has_a_placement(theirs, ours):
    assert import_placement(nested(theirs)).settings == ours


def test_physical_devices_of_vrl_are_those_of_cuda_visible_devices():
    tree = nested(VRL[3][0])
    assert any("CUDA_VISIBLE_DEVICES=4,5" in note for note in import_placement(tree).notes)


RLINF = [
    ("cluster: {num_nodes: 1, component_placement: {'actor,rollout': 0-7}}", {"train": "0-7", "rollout": "0-7"}, 8),
    ("cluster: {component_placement: {actor: 0-3, rollout: '4-7'}}", {"train": "0-3", "rollout": "4-7"}, 8),
    ("cluster: {component_placement: {'actor, env, rollout': all}}", {"train": "all", "rollout": "all"}, None),
    # Environments live with the engine, so the hybrid layout is one in turns.
    (
        "cluster: {component_placement: {actor: 0-7, env: 0-3, rollout: 4-7}}",
        {"train": "0-7", "rollout": "0-7"},
        8,
    ),
    ("cluster: {component_placement: {actor: 0-3, rollout: '2-5'}}", {"train": "0-5", "rollout": "0-5"}, 6),
    ("cluster: {component_placement: {actor: '0-1:0-3', rollout: '2,3:2-3'}}", {"train": "0-1", "rollout": "2-3"}, 4),
    ("cluster: {component_placement: {actor: 4, rollout: 6}}", {"train": "0", "rollout": "1"}, 2),
    (
        """
        cluster:
          num_nodes: 6
          component_placement:
            actor: {node_group: a800, placement: 0-15}
            rollout: {node_group: 4090, placement: 0-15}
            reward: {node_group: node, placement: 0-1}
          node_groups:
            - {label: a800, node_ranks: 0-1}
            - {label: 4090, node_ranks: '2-3'}
            - label: hosts
              node_ranks: 4-5
              env_configs:
                - {node_ranks: 4-5, python_interpreter_path: /opt/reward/bin/python, env_vars: [{OMP_NUM_THREADS: '8'}]}
              hardware: {type: Franka}
        """,
        {"train": "a800", "rollout": "nodes-4090", "reward": "cpu x2"},
        32,
    ),
    # The heterogeneous cluster of RLinf's guide: simulation on nodes of its own, with an interpreter of their own.
    (
        """
        cluster:
          num_nodes: 3
          component_placement:
            actor: {node_group: train, placement: 0-7}
            "env,rollout": {node_group: sim, placement: 0-7}
            reward: {node_group: train, placement: 0-7}
          node_groups:
            - {label: train, node_ranks: 0}
            - label: sim
              node_ranks: 1-2
              env_configs:
                - node_ranks: 1-2
                  env_vars: [{MUJOCO_GL: egl}, {MODE: "yes", PAIR: "a: b,c"}]
                  python_interpreter_path: /opt/sim/bin/python
        """,
        {"train": "train", "rollout": "sim", "reward": "train"},
        16,
    ),
    # A robot has a node without GPUs, where an environment server runs.
    (
        """
        cluster:
          num_nodes: 2
          component_placement:
            "actor,rollout": {node_group: gpu, placement: 0-3}
            env: {node_group: franka, placement: 0}
          node_groups:
            - {label: gpu, node_ranks: 0}
            - {label: franka, node_ranks: 1, hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.0.0.9}]}}
        """,
        {"train": "gpu", "rollout": "gpu"},
        4,
    ),
    # Two roles on parts of one group, and a group that is placed by node.
    (
        """
        cluster:
          num_nodes: 3
          component_placement:
            actor: {node_group: gpu, placement: 0-3}
            rollout: {node_group: gpu, placement: '4,5,6,7'}
            reward: {node_group: hosts, placement: all}
          node_groups:
            - {label: gpu, node_ranks: 0}
            - {label: hosts, node_ranks: 1-2, ignore_hardware: true}
        """,
        {"train": "gpu:0-3", "rollout": "gpu:4-7", "reward": "hosts"},
        10,
    ),
]


TWO_KINDS, SIMULATION, ROBOT, HOSTS = (text for text, *_ in RLINF[-4:])


@pytest.mark.parametrize(("theirs", "placement", "num_devices"), RLINF)
def test_every_placement_of_rlinf_has_one_here(theirs, placement, num_devices):
    settings = of(theirs).settings
    assert (settings["placement"], settings.get("num_devices")) == (placement, num_devices)


@pytest.mark.parametrize("theirs", [*(nested(text) for text, _ in VRL), *(yaml.safe_load(text) for text, *_ in RLINF)])
def test_the_answer_is_a_layout_that_a_recipe_can_have(theirs):
    recipe = load(SEPARATE, ["num_devices=4", "devices_per_node=null", *import_placement(theirs, 4).words])
    assert plan_of(recipe.config).relation in ("separate", "colocate")


def test_groups_of_rlinf_are_groups_of_nodes_with_their_environment():
    answer = of(SIMULATION)
    assert answer.settings["node_groups"] == {
        "train": {"nodes": 0, "devices_per_node": 8},
        "sim": {
            "nodes": "1-2",
            "devices_per_node": 4,
            "env_vars": {"MUJOCO_GL": "egl", "MODE": "yes", "PAIR": "a: b,c"},
            "python_interpreter_path": "/opt/sim/bin/python",
        },
    }
    recipe = load(SEPARATE, ["devices_per_node=null", *answer.words])
    assert recipe.config.node_groups["sim"].env_vars == {"MUJOCO_GL": "egl", "MODE": "yes", "PAIR": "a: b,c"}
    assert plan_of(recipe.config).rollout.indices == tuple(range(8, 16))


def test_a_group_placed_by_node_has_cpu_processes_and_a_robot_gets_a_server():
    assert of(HOSTS).settings["node_groups"]["hosts"] == {"nodes": "1-2", "devices_per_node": 1, "hardware": "cpu"}
    notes = "\n".join(of(ROBOT).notes)
    assert "Franka is no GPU" in notes and "unirl.envs.serve RECIPE" in notes


def test_groups_of_rlinf_keep_what_ray_needs_before_its_start():
    answer = of(TWO_KINDS)
    assert answer.settings["node_groups"]["a800"] == {"nodes": "0-1", "devices_per_node": 8}
    notes = "\n".join(answer.notes)
    for fact in ("/opt/reward/bin/python", "export OMP_NUM_THREADS=8", "Franka", "nodes 4-5"):
        assert fact in notes


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "settings", "note"),
    [
        (2, 8, {"num_devices": 8, "devices_per_node": 4}, "every role shares every device"),
        (2, None, {}, "set num_devices to the devices of all nodes together"),
        (3, 8, {}, "set num_devices to the devices of all nodes together"),
        (1, 8, {}, "every role shares every device"),
    ],
)
def test_nodes_without_components_are_answered_with_devices_of_each_node(num_nodes, num_devices, settings, note):
    answer = import_placement({"cluster": {"num_nodes": num_nodes}}, num_devices)
    assert answer.settings == settings
    assert note in "\n".join(answer.notes)


BROKEN = [
    ("cluster: {component_placement: {actor: '0-3,5-'}}", 2004, "    0-3,5-\n          ^"),
    ("cluster: {component_placement: {actor: 0-3;4}}", 2004, "    0-3;4\n       ^"),
    ("cluster: {component_placement: {actor: '0-1:x'}}", 2004, "    0-1:x\n        ^"),
    ("cluster: {component_placement: {actor: '5-2'}}", 2010, "write 2-5"),
    ("cluster: {component_placement: {actor: '0,0'}}", 2010, "twice"),
    ("cluster: {component_placement: {actor: {node_group: a80, placement: 0}}}", 2003, "no such group"),
    ("cluster: {num_nodes: 2, node_groups: [{label: a, node_ranks: 0-2}]}", 2010, "Set num_nodes=3"),
    ("cluster: {num_nods: 2}", 2003, "Did you mean 'num_nodes'?"),
    ("distributed: {resources: {trainer: {num_gpu: 2}}}", 2003, "Did you mean 'num_gpus'?"),
    ("distributed: {resources: {trainer: {devices: [0]}}}", 2003, "Name trainer.devices and rollout.devices"),
    (
        "distributed: {resources: {visible_devices: [0], trainer: {devices: [0]}, rollout: {devices: [1]}}}",
        2010,
        "names device 1",
    ),
    ("distributed: {resources: {visible_devices: [0], trainer: {num_gpus: 1}}}", 2010, "gets none"),
    ("distributed: {resources: {trainer: {num_gpus: many}}}", 2004, "whole number"),
    ("trainer: {}", 2003, "neither distributed.resources"),
]


@pytest.mark.parametrize(("theirs", "code", "says"), BROKEN)
def test_a_mistake_in_their_words_is_refused_with_its_place(theirs, code, says):
    with pytest.raises(UniRLError) as caught:
        of(theirs)
    assert (caught.value.code, says in str(caught.value)) == (code, True), str(caught.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["distributed.resources.trainer.num_gpus=1", "distributed.resources.rollout.num_gpus=auto"],
            "placement={train: 0, rollout: rest}",
        ),
        (["distributed.resources.rollout.num_gpus=auto"], "placement={train: 0, rollout: rest}"),
        (
            [
                "distributed.resources.visible_devices=[0,1,2,3]",
                "distributed.resources.trainer.devices=[0]",
                "distributed.resources.rollout.devices=[1,2,3]",
            ],
            "placement={train: 0, rollout: 1-3} num_devices=4",
        ),
        (
            ["distributed.resources.rollout.num_gpus=1", "distributed.resources.rollout.num_workers=1"],
            "placement={train: 0, rollout: 1} num_devices=2",
        ),
        (["+cluster.component_placement.actor=0-7"], "placement={train: 0-7} num_devices=8"),
        (["/base/distributed=ray_rollout"], "+placement=ray_rollout"),
        (
            ["/base/distributed=ray_rollout_colocated_single_gpu"],
            "+placement=ray_rollout_colocated_single_gpu",
        ),
    ],
)
def test_their_settings_on_a_recipe_are_answered_with_the_line_to_write(words, line):
    with pytest.raises(UniRLError) as caught:
        load(SEPARATE, words)
    assert f"Write {line}" in str(caught.value)


def test_a_block_that_says_nothing_of_its_own_is_to_be_left_out():
    with pytest.raises(UniRLError, match="Leave it out\n  component_placement is absent"):
        load(SEPARATE, ["+cluster.num_nodes=1"])


@pytest.mark.parametrize(
    ("words", "train", "rollout"),
    [
        (["+placement=ray_rollout", "num_devices=4"], "0", "1-3"),
        (["placement=ray_rollout_colocated_single_gpu"], "0", "0"),
        (["+placement=ray_rollout_cross_node", "num_devices=2"], "0", "1"),
    ],
)
def test_the_presets_of_vrl_are_options(words, train, rollout):
    for toy in ([], ["scale=toy"]):
        config = load(SEPARATE, [*words, *toy]).config
        plan = plan_of(config)
        assert (str(plan.train), str(plan.rollout), config.runtime_in_use) == (train, rollout, "ray")


def test_a_file_is_answered_with_yaml_that_can_be_pasted(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text(textwrap.dedent(TWO_KINDS))
    import_file([str(file)])
    written = yaml.safe_load(capsys.readouterr().out)
    assert written == {
        "node_groups": {
            "a800": {"nodes": "0-1", "devices_per_node": 8},
            "nodes-4090": {"nodes": "2-3", "devices_per_node": 8},
        },
        "placement": {"train": "a800", "rollout": "nodes-4090", "reward": "cpu x2"},
        "num_devices": 32,
    }
