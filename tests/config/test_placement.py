"""Who sits where: places are read, layouts that cannot be are refused with a line that works."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.device_sets import DeviceSet, device_set_at, num_device_sets, num_named, scaled, spell
from unirl.config.errors import ConfigError
from unirl.config.load import load
from unirl.config.recipe import RecipeConfig
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight

TRAINSIDE = load("diffusion/sd3_trainside").config
DEDICATED = load("diffusion/sd3_replica_lora_colocate").config
BY_CUDA_IPC = load("diffusion/sd3_replica_lora_colocate", ["sync.transport=cuda_ipc"]).config


def config(base: RecipeConfig, num_devices: int, **placement) -> RecipeConfig:
    return dataclasses.replace(base, num_devices=num_devices, placement=placement or None)


def device(*indices: int) -> DeviceSet:
    return DeviceSet("device", indices)


def refused(base: RecipeConfig, num_devices: int, **placement) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_of(config(base, num_devices, **placement))
    return caught.value


@pytest.mark.parametrize(
    ("where", "indices"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0,2", (0, 2)),
        (3, (3,)),
        ("3", (3,)),
        ("2, 0-1", (0, 1, 2)),
        ((1, 3), (1, 3)),
        ("all", (0, 1, 2, 3)),
    ],
)
def test_every_way_to_write_devices_is_read(where, indices):
    assert device_set_at("train", where, 4) == device(*indices)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_slab_is_written_as_it_is_read(indices):
    device_set = device(*sorted(indices))
    assert device_set_at("train", spell(device_set.indices), 41) == device_set
    assert device_set_at("train", tuple(sorted(indices, reverse=True)), 41) == device_set


def test_roles_share_everything_when_no_place_is_written():
    for base, relation in ((TRAINSIDE, "trainside"), (DEDICATED, "colocate")):
        plan = plan_of(config(base, 4))
        assert set(plan.device_sets.values()) == {device(0, 1, 2, 3)}
        assert plan.relation == relation
        assert plan.is_dedicated == (relation != "trainside")


@pytest.mark.parametrize(
    ("placement", "relation"),
    [
        ({"train": "0-1", "rollout": "2-3"}, "separate"),
        ({"train": "2-3", "rollout": "0-1"}, "separate"),
        ({"train": "0-3", "rollout": "0-3"}, "colocate"),
        ({"train": "all", "rollout": "3,2,1,0"}, "colocate"),
        ({"train": "all"}, "colocate"),
        ({"reward": "cpu"}, "colocate"),
    ],
)
def test_the_relation_follows_from_the_device_sets(placement, relation):
    plan = plan_of(config(DEDICATED, 4, **placement))
    assert plan.relation == relation


def test_the_reward_stands_beside_the_rollout_unless_it_says_otherwise():
    layout = {"train": "0-1", "rollout": 2}
    assert plan_of(config(DEDICATED, 3, **layout)).reward == device(2)
    assert plan_of(config(DEDICATED, 3, **layout, reward="in train")).reward == device(0, 1)
    assert plan_of(config(DEDICATED, 3, **layout, reward="cpu x2")).reward == DeviceSet("cpu", (0, 1))
    assert plan_of(config(DEDICATED, 4, **layout, reward=3)).reward == device(3)
    assert plan_of(config(TRAINSIDE, 2, train=0, reward=1)).reward == device(1)


def test_the_plan_says_itself_in_one_line():
    plan = plan_of(config(DEDICATED, 4, train="0-1", rollout="2-3", reward="cpu"))
    assert plan.describe() == "separate: train on devices 0-1, rollout on devices 2-3, reward on cpu"
    assert plan_of(config(TRAINSIDE, 1)).describe() == "trainside: train, rollout and reward on device 0"


def test_an_engine_that_gets_its_weights_by_cuda_ipc_has_processes_of_its_own_on_the_trainers_devices():
    train, engine = device(0, 1), DeviceSet("device", (0, 1), process=1)
    for placement in ({}, {"train": "0-1", "rollout": "0-1"}, {"reward": "in rollout"}):
        plan = plan_of(config(BY_CUDA_IPC, 2, **placement))
        assert (plan.train, plan.rollout, plan.reward, plan.relation) == (train, engine, engine, "colocate")
        assert plan_of(config(DEDICATED, 2, **placement)).rollout == train
    assert plan.describe() == (
        "colocate: train on devices 0-1, rollout and reward on devices 0-1 in processes of their own"
    )
    for reward in ("in train", "0-1"):
        assert plan_of(config(BY_CUDA_IPC, 2, reward=reward)).reward == train
    local = dataclasses.replace(BY_CUDA_IPC, runtime="local")
    assert plan_of(config(local, 1)).rollout == plan_of(config(local, 1)).train
    assert plan_of(config(BY_CUDA_IPC, 2, train=0, rollout=1)).rollout == device(1)


@pytest.mark.parametrize(
    ("placement", "code", "says"),
    [
        ({"trian": 0}, 2003, "Did you mean 'train'?"),
        ({"train": "0-8", "rollout": "0-8"}, 2010, "names device 8, and num_devices=8 has only devices 0-7"),
        ({"train": "3-0", "rollout": "4-7"}, 2010, "is a descending range: write 0-3"),
        ({"train": "0,0", "rollout": "1-7"}, 2010, "names device 0 twice"),
        ({"train": "0-3", "rollout": "2-7"}, 2010, "share only 2-3"),
        ({"train": "0-3", "rollout": "4-7", "reward": "3-4"}, 2010, "share only 3"),
        ({"train": "0-3"}, 2010, "leaves devices 4-7 of num_devices=8 without a role"),
        ({"train": "0-3"}, 2010, "or set num_devices=4"),
        ({"rollout": "4-7"}, 2010, "placement={train: 0-3, rollout: 4-7}"),
        ({"train": "gpu:0"}, 2003, "there is no group of nodes gpu. node_groups: none: write node_groups, or devices"),
        ({"train": -1}, 2004, "names no devices"),
        ({"train": ()}, 2004, "names no device"),
        ({"train": "in rollout", "rollout": "0-7"}, 2004, "names no devices"),
        ({"train": "cpu"}, 2020, "only the reward may run outside the devices"),
        ({"train": "all", "reward": "cpu x0"}, 2004, "no process"),
        ({"train": "0-7", "rollout": "in train"}, 2020, "Write rollout: 0-7"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_way_out(placement, code, says):
    error = refused(DEDICATED, 8, **placement)
    assert error.code == code
    assert says in str(error)


@pytest.mark.parametrize("placement", [{"train": "0-3", "rollout": "4-7"}, {"train": "0-7", "rollout": "0-7"}])
def test_an_engine_on_the_trained_weights_has_no_place_of_its_own(placement):
    error = refused(TRAINSIDE, 8, **placement)
    assert error.code == 2020
    assert "rollout: in train" in str(error)
    assert plan_of(config(TRAINSIDE, 8, train="0-7", rollout="in train")).relation == "trainside"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["layout=separate"], "{train: 0-3, rollout: 4-7}"),
        (["train_fraction=0.5"], "{train: 0-3, rollout: 4-7}"),
        (["layout=separate", "train_fraction=0.25"], "{train: 0-1, rollout: 2-7}"),
        (["layout=colocate"], "{train: 0-7, rollout: 0-7}"),
        (["layout=colocate", "train_fraction=0.5"], "{train: 0-7, rollout: 0-7}"),
        (["layout=separate", "num_devices=1"], "{train: 0, rollout: 1} and num_devices=2"),
    ],
)
def test_words_of_other_systems_are_answered_with_a_line_that_works(words, line):
    recipe = "diffusion/sd3_replica_lora_separate"
    with pytest.raises(ConfigError) as caught:
        load(recipe, words)
    assert f"placement={line}" in str(caught.value)
    answer = re.findall(r"(?:placement=\{.*?\}|num_devices=\d)", str(caught.value).partition("Write")[2])
    others = [word for word in words if word.startswith("num_devices")]
    preflight(load(recipe, [*others, *answer]))


@pytest.mark.parametrize("fraction", ["0.3", "0", "1", "2", "half", "-0.5"])
def test_a_fraction_that_is_no_whole_number_of_devices_is_refused(fraction):
    with pytest.raises(ConfigError, match="no whole number of devices") as caught:
        load("diffusion/sd3_replica_lora_separate", [f"train_fraction={fraction}"])
    assert caught.value.code == 2010


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 32))
def test_a_layout_keeps_its_relation_and_wastes_no_device_at_any_size(train, rollout, num_devices):
    written = {"train": spell(range(train)), "rollout": spell(range(train, train + rollout)), "reward": "in rollout"}
    small = scaled(written, num_devices)
    assert small["reward"] == "in rollout"
    if num_devices < num_device_sets(written):
        assert refused(DEDICATED, num_devices, **small).code == 2010
        return
    plan = plan_of(config(DEDICATED, num_devices, **small))
    assert plan.relation == "separate"
    share = num_devices * train / (train + rollout)
    assert abs(len(plan.train) - share) <= 0.5 or 1 in (len(plan.train), len(plan.rollout))


def test_equal_slabs_stay_equal_and_what_cannot_be_read_stays_as_it_is():
    assert scaled({"train": "0-7", "rollout": "0-7", "reward": 8}, 3) == {
        "train": "0-1",
        "rollout": "0-1",
        "reward": "2",
    }
    assert scaled({"train": "7-0", "rollout": "all"}, 3) == {"train": "7-0", "rollout": "all"}
    assert scaled({"train": "4-7", "rollout": "0-3"}, 2) == {"train": "1", "rollout": "0"}
    assert (num_device_sets({"train": "0-7", "rollout": "0-7"}), num_named({"train": "0-1", "rollout": 2})) == (1, 3)
    assert (num_device_sets({"train": "all"}), num_named({})) == (1, 1)
