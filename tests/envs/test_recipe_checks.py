"""What a recipe of a policy that acts gets wrong is refused before any model is built, and says the way out."""

import sys

import gymnasium
import pytest

from unirl.config.errors import DependencyError, UniRLError
from unirl.config.load import load
from unirl.models.base import Bundle
from unirl.plan.machine import check_engines
from unirl.plan.preflight import preflight

PPO, SAC, FLOW = "embodied/cartpole_ppo", "embodied/pendulum_sac", "embodied/quickstart"
LQR = "unirl.testing.toy_environments:LQR-v0"
STACK = "unirl.train.stack.TrainStack"
POLICIES = "unirl.models.policies.bundle"


@pytest.fixture(autouse=True)
def no_bundle_is_built(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise AssertionError("a check builds no bundle")

    monkeypatch.setattr(Bundle, "__init__", refuse)


@pytest.mark.parametrize(
    ("recipe", "overrides", "code", "says"),
    [
        (
            PPO,
            ["pipeline.env.id=CartPoole-v1"],
            2004,
            "pipeline.env.id=CartPoole-v1 is no .* Did you mean 'CartPole-v1'",
        ),
        (PPO, ["pipeline.env.kwargs={gravity: 3}"], 2004, "does not take kwargs={'gravity': 3}"),
        (PPO, ["bundle.observations=5"], 2020, r"shape \[5\], and the environment shows \[4\]. .* bundle.observations"),
        (PPO, ["bundle.observations={pixels: [3, 8, 8]}"], 2020, "reads the observation 'pixels', .* shows state"),
        (
            PPO,
            ["bundle.actions=3"],
            2020,
            "3 discrete actions, .* 2 discrete actions. Set their number in bundle.actions",
        ),
        (
            PPO,
            [f"bundle={{_target_: {POLICIES}.GaussianBundle, observations: 4, actions: 2}}"],
            2020,
            "2 continuous actions, .* CategoricalBundle",
        ),
        (PPO, [f"pipeline.env.id={LQR}", "bundle.observations=3"], 2020, "2 discrete actions, .* 1 continuous actions"),
        (
            PPO,
            ["stack._target_=unirl.train.replay_stack.ReplayStack"],
            2020,
            "kind TransitionLoss, and algorithm is",
        ),
        (PPO, ["stack.num_updates_per_batch=2"], 2020, "set stack.epochs and stack.minibatch_size"),
        (SAC, [f"stack={{_target_: {STACK}}}"], 2020, "SAC trains on transitions .*replay_stack.ReplayStack"),
        (SAC, ["bundle.squashed=false"], 2020, "has a GaussianPolicy. .* squashed: true"),
        (SAC, ["num_devices=2", "batch_size=2", "runtime=ray"], 2020, "trains on one device, .* gives it 2"),
        (FLOW, ["bundle.path=nowhere"], 4001, "there is no nowhere/config.json"),
        (FLOW, ["pipeline.env.task=reach-v9"], 2004, "pipeline.env.task=reach-v9 .* Did you mean 'reach-v3'"),
        (
            FLOW,
            ["pipeline.env.max_steps=42", "sampling.max_steps=9"],
            2020,
            "chunk=5 does not divide the 42 .*max_steps=40",
        ),
        (
            "embodied/halfcheetah_ppo",
            ["bundle.squashed=true", "algorithm.entropy_coef=0.1"],
            2020,
            "the entropy of a SquashedGaussianPolicy has no closed form",
        ),
        (
            SAC,
            [
                "bundle.observations={pixels: [3, 24, 24]}",
                "bundle.actions=2",
                "pipeline.env={_target_: unirl.envs.pixel_reach.PixelReachEnvironment}",
            ],
            2020,
            "pixels is an image, and these critics read vectors",
        ),
        (
            "embodied/maniskill_pickcube_ppo_openvla_oft",
            [
                "scale=toy",
                "algorithm={_target_: unirl.algorithms.sac.SAC}",
                "stack={_target_: unirl.train.replay_stack.ReplayStack}",
            ],
            2020,
            "trains squashed Gaussian policies, and the bundle has a openvla",
        ),
        *[
            (
                recipe,
                [
                    "scale=toy",
                    "algorithm={_target_: unirl.algorithms.imitation.BehaviourCloning}",
                    "stack={_target_: unirl.train.replay_stack.ReplayStack, offline: {path: toy}, offline_share: 1}",
                ],
                2020,
                "BehaviourCloning imitates .* for which a (openvla|pi0) has no loss",
            )
            for recipe in ("embodied/maniskill_pickcube_ppo_openvla_oft", "embodied/libero_pi0_ppo")
        ],
        (FLOW, ["algorithm.ratio_of=part"], 2020, "the decisions of a FlowPolicy have no parts"),
        (SAC, ["bundle.normalize=true"], 2020, "ReplayStack does not follow the statistics of observations"),
    ],
)
def test_parts_that_do_not_fit_are_refused(recipe, overrides, code, says):
    loaded = load(recipe, overrides)
    with pytest.raises(UniRLError, match=says) as caught:
        preflight(loaded)
    assert caught.value.code == code


def test_rows_that_end_before_the_episode_need_no_chunk_that_divides_it():
    assert not preflight(load(FLOW, ["pipeline.env.max_steps=42", "sampling.max_steps=8"])).notices


@pytest.fixture
def endless():
    """An environment without a limit, whose starts are not keyed."""
    gymnasium.register("Endless-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", nondeterministic=True)
    yield "pipeline.env.id=Endless-v0"
    del gymnasium.registry["Endless-v0"]


def test_an_environment_that_is_not_keyed_says_the_determinism_class(endless):
    notices = preflight(load(PPO, [endless, "evaluation.eval_steps=0"])).notices
    assert any("Determinism class of the run: statistical" in notice for notice in notices)


@pytest.mark.parametrize("overrides", [["~sampling.continuing", "~sampling.max_steps", "evaluation.eval_steps=0"], []])
def test_episodes_without_an_end_are_refused(endless, overrides):
    """Evaluations play whole episodes, so that the limit of the rows of training is none of theirs."""
    with pytest.raises(UniRLError, match=r"sampling\.max_steps is absent, and the environment sets no limit"):
        preflight(load(PPO, [endless, *overrides]))


def test_a_missing_library_refuses_a_run_here_and_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "metaworld", None)
    monkeypatch.setattr("unirl.config.dependencies.find_spec", lambda name: None)
    recipe = load(FLOW)
    preflight(recipe)
    with pytest.raises(DependencyError, match=r"pip install 'unirl\[metaworld\]'"):
        check_engines(recipe)
