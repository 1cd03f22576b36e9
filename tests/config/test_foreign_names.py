"""Names of RLinf are answered with ours, which exist."""

import re

import pytest

from unirl.config.errors import UniRLError
from unirl.config.load import load
from unirl.config.recipe_files import find_recipe


@pytest.mark.parametrize(
    ("recipe", "theirs", "ours"),
    [
        ("cartpole_ppo", "algorithm.adv_type=gae", "algorithm._target_"),
        ("cartpole_ppo", "algorithm.loss_type=actor_critic", "algorithm._target_"),
        ("cartpole_ppo", "env.train.total_num_envs=64", "pipeline.env"),
        ("cartpole_ppo", "total_num_envs=64", "batch_size"),
        ("cartpole_ppo", "algorithm.group_size=8", "sampling.samples_per_prompt"),
        ("cartpole_ppo", "algorithm.update_epoch=8", "stack.epochs"),
        ("cartpole_ppo", "stack.global_batch_size=8", "stack.minibatch_size"),
        ("cartpole_ppo", "algorithm.clip_ratio_low=0.2", "algorithm.clip_range"),
        ("cartpole_ppo", "algorithm.clip_ratio_high=0.2", "algorithm.clip_range_high"),
        ("cartpole_ppo", "algorithm.huber_delta=10", "algorithm.value_huber"),
        ("cartpole_ppo", "algorithm.entropy_bonus=0", "algorithm.entropy_coef"),
        ("cartpole_ppo", "sampling.auto_reset=true", "sampling.continuing"),
        ("cartpole_ppo", "pipeline.env.max_episode_steps=50", "pipeline.env.max_steps"),
        ("cartpole_ppo", "evaluation.val_check_interval=5", "evaluation.eval_steps"),
        ("cartpole_ppo", "seed=1", "sampling.seed"),
        ("pendulum_sac", "algorithm.q_head_type=crossq", "algorithm.norm"),
    ],
)
def test_a_key_of_rlinf_is_answered_with_a_key_that_exists(recipe, theirs, ours):
    with pytest.raises(UniRLError) as caught:
        load(f"embodied/{recipe}", [f"+{theirs}"])
    assert re.search(rf"Write {re.escape(ours)}\b", str(caught.value)), str(caught.value)
    if not ours.endswith("_target_"):
        value = load(f"embodied/{recipe}").resolved()
        for key in ours.split("."):
            assert key in value
            value = value[key]


def test_a_chunk_of_rlinf_is_that_of_a_bundle():
    policy = "bundle={_target_: unirl.models.policies.bundle.FlowBundle, observations: 4, actions: 2, chunk: 5}"
    load("embodied/cartpole_ppo", [policy])
    with pytest.raises(UniRLError, match=r"Write bundle\.chunk"):
        load("embodied/cartpole_ppo", [policy.replace("chunk", "num_action_chunks")])


@pytest.mark.parametrize(
    ("theirs", "first"),
    [
        ("maniskill_ppo_openvlaoft", "_ppo"),
        ("metaworld_sac_mlp", "_sac"),
        ("libero_spatial_crossq", "_crossq"),
        ("train_embodied_agent.py", ""),
    ],
)
def test_a_name_of_rlinf_is_answered_with_recipes_of_policies(theirs, first):
    with pytest.raises(UniRLError) as caught:
        find_recipe(theirs)
    named = re.findall(r"embodied/\w+", str(caught.value))
    assert len(named) == 3 and any(first in recipe for recipe in named)


def test_other_names_are_answered_as_before():
    with pytest.raises(UniRLError, match="Nearest: diffusion/") as caught:
        find_recipe("diffusion/sd3_trainsid")
    assert "embodied/" not in str(caught.value)
