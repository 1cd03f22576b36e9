"""Recorded samples: a recipe whose loss, engine, data, group and reward do not agree about them never starts."""

from __future__ import annotations

import pytest

from unirl.config.errors import ConfigError, UniRLError
from unirl.config.load import load
from unirl.plan.preflight import preflight

OFFLINE, ONLINE = "diffusion/sd3_dpo_offline", "diffusion/sd3_online_dpo"
ALGORITHMS = "algorithm._target_=unirl.algorithms."
OWN = {
    "diffusion_grpo.DiffusionGRPO": ("sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy",),
    "diffusion_dppo.DiffusionDPPO": ("sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy",),
    "diffusion_ppo.DiffusionPPO": (
        "sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy",
        "backend.value_cfg={}",
    ),
    "diffusion_nft.DiffusionNFT": ("backend.ema_lora_cfg={}",),
    "diffusion_awm.DiffusionAWM": ("backend.ema_lora_cfg={}",),
    "drtune.DRTune": (),
    "drtune.ReFL": (),
    "drtune.DRaFT": (),
    "drtune.AlignProp": (),
}
"""Losses on samples of the policy itself, with what else they need."""
ANY = {
    "diffusion_dpo.DiffusionDPO": (),
    "diffusion_rwr.DiffusionRWR": ("algorithm.weighting=reward",),
}


def refused(recipe: str, *overrides: str) -> UniRLError:
    with pytest.raises(UniRLError) as caught:
        preflight(load(recipe, overrides))
    return caught.value


@pytest.mark.parametrize("name", OWN)
def test_a_loss_on_the_policys_own_samples_is_refused(name: str) -> None:
    error = refused(OFFLINE, ALGORITHMS + name, *OWN[name])
    assert isinstance(error, ConfigError) and error.code == 2020
    loss = name.rpartition(".")[2]
    assert f"{loss} learns from samples of the policy itself, and RecordedRolloutEngine returns" in str(error)


@pytest.mark.parametrize("name", ANY)
def test_a_loss_on_any_samples_may_start(name: str) -> None:
    preflight(load(OFFLINE, [ALGORITHMS + name, *ANY[name]]))


@pytest.mark.parametrize("roles", ["[chosen]", "[rejected,chosen]"])
def test_a_group_has_a_place_for_each_recorded_sample(roles: str) -> None:
    rwr = [ALGORITHMS + "diffusion_rwr.DiffusionRWR", f"data_source.recorded={roles}"]
    number = len(roles.split(","))
    preflight(load(OFFLINE, [*rwr, f"sampling.samples_per_prompt={number}"]))
    error = refused(OFFLINE, *rwr, "sampling.samples_per_prompt=4")
    assert error.code == 2020 and f"Set sampling.samples_per_prompt={number}" in str(error)


SCORER = "reward.backend._target_=unirl.reward.local.recorded.RecordedRewardScorer"


@pytest.mark.parametrize(
    ("recipe", "overrides", "code", "says"),
    [
        (OFFLINE, ["data_source.recorded=[]"], 2020, "Set data_source.recorded=[chosen,rejected]"),
        (ONLINE, ["data_source.recorded=[chosen,rejected]"], 2020, "TrainsideRolloutEngine generates its samples"),
        (OFFLINE, ["data_source.recorded=[chosen,chosen]"], 2020, "names a role twice"),
        (OFFLINE, ["data_source.recorded=[chosen,best]"], 2004, "data_source.recorded"),
        (ONLINE, [SCORER], 2020, "reward.backend (RecordedRewardScorer) returns rewards that were recorded"),
        (OFFLINE, ["placement={train: 0, rollout: 1}", "num_devices=2"], 2020, "placement.rollout"),
    ],
)
def test_parts_that_disagree_about_recorded_samples_are_refused(recipe, overrides, code, says) -> None:
    error = refused(recipe, *overrides)
    assert (error.code, says in str(error)) == (code, True), str(error)


@pytest.mark.parametrize(("recipe", "number"), [(OFFLINE, 2), ("diffusion/sd3_refl", 1), (ONLINE, 4)])
def test_toy_scale_never_makes_a_group_larger(recipe: str, number: int) -> None:
    toy = load(recipe, ["scale=toy"])
    assert toy.value("sampling.samples_per_prompt") == number
    assert toy.value("sampling.height") == 32
    assert load(recipe, ["scale=toy", "sampling.samples_per_prompt=3"]).value("sampling.samples_per_prompt") == 3


def test_the_recipe_has_the_numbers_of_the_published_run() -> None:
    recipe = load(OFFLINE)
    published = {
        "batch_size": 2048,
        "num_rollouts": 2000,
        "stack.num_updates_per_batch": 1,
        "backend.lora_cfg": None,
        "backend.optimizer_cfg.learning_rate": 2.05e-5,
        "backend.scheduler_cfg.type": "constant",
        "backend.scheduler_cfg.warmup_updates": 500,
        "algorithm.times.num_times": 1,
        "algorithm.reference": "reference",
    }
    assert {key: recipe.value(key) for key in published} == published
    assert 2000 <= recipe.value("algorithm.beta") <= 5000
