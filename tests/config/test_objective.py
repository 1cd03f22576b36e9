"""A loss on the reward's gradient is refused where there is none, or where it cannot be reached."""

import pytest

from unirl.config.errors import UniRLError
from unirl.config.load import load
from unirl.plan.preflight import preflight

RECIPE = "diffusion/sd3_drtune"
BRIGHTNESS = "unirl.reward.local.image_statistics.BrightnessRewardScorer"
JPEG = "unirl.reward.local.image_statistics.JpegCompressibilityRewardScorer"
WEIGHTED = (
    "reward.backend={{_target_: unirl.reward.combine.WeightedRewards, weights: {{a: 1.0, b: 1.0}}, "
    "scorers: {{a: {{_target_: {}}}, b: {{_target_: {}}}}}}}"
)
REPLICA = (
    "rollout._target_=unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
    "sync._target_=unirl.distributed.weight_sync.sync.EngineSync",
)


def refused(*overrides: str) -> UniRLError:
    with pytest.raises(UniRLError) as caught:
        preflight(load(RECIPE, overrides))
    return caught.value


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"reward.backend._target_={BRIGHTNESS}"],
        [WEIGHTED.format(BRIGHTNESS, BRIGHTNESS)],
        [WEIGHTED.format(BRIGHTNESS, JPEG).replace("b: 1.0", "b: 0.0")],  # logged only
        ["placement={reward: in train}"],
        ["num_devices=8"],
        ["algorithm.gradient_steps.num_steps=12"],
        ["algorithm._target_=unirl.algorithms.drtune.ReFL"],
    ],
    ids=str,
)
def test_what_has_a_gradient_may_start(overrides):
    preflight(load(RECIPE, overrides))


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        ([f"reward.backend._target_={JPEG}"], 2020, "DRTune needs the gradient of the reward, and reward.backend ("),
        (
            [WEIGHTED.format(BRIGHTNESS, JPEG)],
            2020,
            "reward.backend.scorers.b (JpegCompressibilityRewardScorer) has none",
        ),
        ([*REPLICA], 2020, "rollout._target_=unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"),
        (["placement={reward: cpu}"], 2020, "placement.reward puts it on cpu. Leave placement.reward out"),
        (["algorithm.gradient_steps.num_steps=14"], 2004, "needs 14"),
        (["algorithm.early_stop=1.0"], 2004, "algorithm.early_stop must lie in [0, 1), got 1"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_work_is_refused_with_rule_and_way_out(overrides, code, says):
    error = refused(*overrides)
    assert error.code == code
    assert says in str(error)


def test_an_image_of_tokens_has_no_gradient():
    words = ["rollout=trainside", "algorithm={_target_: unirl.algorithms.drtune.ReFL}"]
    with pytest.raises(UniRLError, match="samples of NextStepPipeline have no gradient") as caught:
        preflight(load("unified_model/nextstep_1_grpo", words))
    assert caught.value.code == 2020


def test_a_group_of_one_is_not_called_idle_where_nothing_is_compared():
    said = preflight(load(RECIPE)).notices
    assert not any("a group of one has no advantage" in line for line in said)
    other = preflight(load("diffusion/sd3_trainside", ["sampling.samples_per_prompt=1"])).notices
    assert any("a group of one has no advantage" in line for line in other)


def test_keys_of_the_choice_of_steps_need_no_class():
    recipe = load(RECIPE, ["algorithm.gradient_steps.num_steps=3"])
    steps = recipe.resolved()["algorithm"]["gradient_steps"]
    assert steps == {"_target_": "unirl.sde.steps.EquallySpacedSteps", "num_steps": 3}
    toy = load(RECIPE, ["scale=toy"]).resolved()["algorithm"]["gradient_steps"]
    assert toy["num_steps"] == 2
