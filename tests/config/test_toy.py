"""scale=toy: small values for any recipe, which the command line overrules."""

import math

import pytest
import yaml

from unirl.config.errors import ConfigError
from unirl.config.load import load
from unirl.config.merge import ConfigLayer, fold, get
from unirl.config.recipe import policy_keys
from unirl.config.recipe_files import list_recipes
from unirl.config.toy import NUM_PROMPTS, QUANTITIES, toy_layer
from unirl.models.policies.bundle import PolicyBundle
from unirl.plan.layout import check_layout
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight
from unirl.reward.local.aesthetic import AestheticSpec

RECIPES = [recipe.name for recipe in list_recipes()]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_and_small_at_toy_scale(name):
    recipe = load(name, ["scale=toy"])
    geometry = preflight(recipe).geometry
    assert geometry.num_samples <= 32
    for policy in recipe.policies.values():
        # A policy that acts is small at any scale; one with new weights has no path.
        is_small = issubclass(policy.bundle.schema.owner, PolicyBundle)
        assert is_small or (policy.model_path or "").startswith("toy")
        assert all(snapshot.get("path", str) == "toy" for snapshot in policy.loaded_snapshots.values())
    assert recipe.config.num_rollouts == QUANTITIES["num_rollouts"]


def without_sizes(block):
    """A block without the numbers of denoising steps in it, which shrink with the schedule."""
    if not isinstance(block, dict):
        return block
    return {key: without_sizes(value) for key, value in block.items() if key != "num_steps"}


@pytest.mark.parametrize("name", RECIPES)
def test_toy_changes_sizes_and_never_what_is_learned(name):
    full, toy = load(name), load(name, ["scale=toy"])
    assert full.value("advantage") == toy.value("advantage")
    tree = full.resolved()
    for key in policy_keys(tree, "algorithm"):
        assert without_sizes(full.value(key)) == without_sizes(toy.value(key))
    for key in policy_keys(tree, "sampling.kernel"):  # text has none
        assert get(full.resolved(), key) == get(toy.resolved(), key)
    for key in policy_keys(tree, "stack.num_updates_per_batch"):
        assert full.value(key) == toy.value(key)


def test_the_command_line_wins_over_toy():
    recipe = load(
        "diffusion/sd3_trainside", ["sampling.height=64", "scale=toy", "bundle.path=/models/x", "batch_size=6"]
    )
    assert recipe.value("sampling.height") == 64
    assert recipe.value("sampling.width") == 32
    assert recipe.value("bundle.path") == "/models/x"
    assert recipe.config.batch_size == 6


def test_toy_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("PRETRAINED_MODEL", "/models/sd3")
    assert load("diffusion/sd3_trainside", ["scale=toy"]).value("bundle.path") == "toy"


@pytest.mark.parametrize(("own", "toy"), [(81, 5), (6, 5), (5, 5), (1, 1)])
def test_a_recipe_keeps_its_frames_where_they_are_few(own, toy):
    tree = load("diffusion/sd3_trainside").composed.resolved()
    tree["sampling"]["num_frames"] = own
    assert get(fold((ConfigLayer("", tree), toy_layer(tree))), "sampling.num_frames") == toy


def test_a_class_says_its_own_toy_values_wherever_it_stands():
    recipe = load("diffusion/sd3_trainside", ["scale=toy"])
    assert recipe.value("reward.backend.config.path") == "toy"
    assert recipe.value("sampling.sde_steps.num_steps") == 2
    assert recipe.value("backend.lora_cfg.rank") == 4


AESTHETIC = "unirl.reward.local.aesthetic.AestheticRewardScorer"


@pytest.mark.parametrize("typed", [f"reward.backend._target_={AESTHETIC}", f"reward.backend={{_target_: {AESTHETIC}}}"])
def test_a_class_that_is_typed_says_its_own_toy_values_too(typed):
    recipe = load("diffusion/sd3_trainside", ["scale=toy", typed])
    toy = dict(AestheticSpec.toy)
    assert toy["path"] == "toy"
    assert {name: recipe.value(f"reward.backend.config.{name}") for name in toy} == toy


def test_what_is_typed_about_a_typed_class_wins_over_its_toy_values():
    words = [f"reward.backend._target_={AESTHETIC}", "scale=toy", "reward.backend.config.path=/models/a"]
    assert load("diffusion/sd3_trainside", words).value("reward.backend.config.path") == "/models/a"


@pytest.mark.parametrize("updates", range(1, 13))
def test_the_number_of_prompts_fits_any_number_of_updates(updates):
    tree = load("diffusion/sd3_trainside").composed.resolved()
    tree["stack"]["num_updates_per_batch"] = updates
    toy = fold((toy_layer(tree),))
    samples = toy["batch_size"] * get(toy, "sampling.samples_per_prompt")
    assert samples % updates == 0
    assert toy["batch_size"] >= NUM_PROMPTS
    assert toy["batch_size"] <= NUM_PROMPTS * updates


SEPARATE = "diffusion/sd3_replica_lora_separate"


@pytest.mark.parametrize(
    ("typed", "train", "rollout"),
    [
        ([], "0", "1"),
        (["num_devices=4"], "0-1", "2-3"),
        (["num_devices=5"], "0-1", "2-4"),
        (["placement={train: 1, rollout: 0}"], "1", "0"),
        (["placement={train: 0, rollout: 0}"], "0", "0"),
        (["placement.train=0-2", "placement.rollout=3"], "0-2", "3"),
        (["placement.reward=cpu"], "0", "1"),
        (["~placement"], "0", "0"),
        (["placement=null"], "0", "0"),
    ],
)
def test_the_layout_fits_the_devices_that_are_left_unless_it_is_typed(typed, train, rollout):
    recipe = load(SEPARATE, ["scale=toy", *typed])
    plan = plan_of(recipe.config)
    assert (str(plan.train), str(plan.rollout)) == (train, rollout)
    check_layout(recipe.config, plan)


def test_toy_takes_one_device_where_none_is_needed_for_the_engine():
    for name in ("sd3_trainside", "sd3_replica_full_colocate"):
        config = load(f"diffusion/{name}", ["scale=toy"]).config
        assert (config.num_devices, config.runtime_in_use) == (1, "local")
        config = load(f"diffusion/{name}", ["scale=toy", "num_devices=4"]).config
        assert len(plan_of(config).train) == 4
    with pytest.raises(ConfigError, match="Set num_devices=2"):
        plan_of(load(SEPARATE, ["scale=toy", "num_devices=1"]).config)


def test_a_service_between_processes_is_left_out_where_there_is_one_process_unless_it_is_typed():
    recipe = "diffusion/sd3_trainside_tq_mooncake"
    assert load(recipe, ["scale=toy"]).config.transfer_queue is None
    service = load(recipe, ["scale=toy", "runtime=ray"]).config.transfer_queue
    assert service is not None and service.get("protocol", str) == "tcp"
    assert load(recipe, ["scale=toy", "transfer_queue=simple"]).config.transfer_queue is not None


def test_a_recipe_may_say_that_it_is_toy(tmp_path):
    text = yaml.safe_dump({"defaults": ["base", "_self_"], "scale": "toy"}, sort_keys=False)
    base = load("diffusion/sd3_trainside").file.path.read_text()
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "small.yaml").write_text(text)
    assert load(str(tmp_path / "small.yaml")).config.num_rollouts == 3
    assert math.isclose(load(str(tmp_path / "base.yaml")).config.num_rollouts, 10000)


def test_classes_below_names_of_their_own_are_small_too():
    recipe = load("diffusion/sd3_multi_reward", ["scale=toy"])
    for scorer in ("pickscore", "hpsv2", "aesthetic"):
        assert recipe.value(f"reward.backend.scorers.{scorer}.config.path") == "toy"
