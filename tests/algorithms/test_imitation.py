"""Behaviour cloning against closed forms, and DAgger against behaviour cloning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from tests.scripted_environment import Clocks, request
from unirl.algorithms.imitation import BehaviourCloning
from unirl.config.errors import IncompatibleError
from unirl.config.load import load
from unirl.data.demonstrations import DemonstrationsConfig, segment_of, toy_segment
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.models.policies.bundle import CategoricalBundle, FlowBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.expert import PolicyExpert
from unirl.models.policies.flow import FlowPolicy
from unirl.models.policies.networks import GaussianPolicy
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.plan.preflight import preflight
from unirl.sde.noise import NoiseSource, key_seed
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig
from unirl.train.replay_stack import ReplayStack
from unirl.types.environments import ContinuousActions, DiscreteActions, EpisodeStart, Observations
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions

LQR = "unirl.testing.toy_environments:LQR-v0"


class Damper:
    """An expert of the linear system: it moves against the state."""

    def label(self, observations: Observations) -> Tensor:
        return (-0.5 * observations["state"][:, :1]).clamp(-1, 1)


def batch_of(state: Tensor, actions: Tensor) -> Transitions:
    nothing = torch.zeros(len(state))
    return Transitions(
        observations={"state": state}, actions=actions[:, None], rewards=nothing, discounts=nothing, following={}
    )


def minimised(bundle: PolicyBundle, batch: Transitions, parameters: list[Tensor]) -> float:
    """The smallest loss over some parameters, by L-BFGS."""
    stage, loss = bundle.stage(), BehaviourCloning()
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=500, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss.transition_loss(stage, batch, torch.Generator().manual_seed(0)).loss
        value.backward()
        return value

    optimizer.step(closure)
    return closure().item()


def test_cloning_by_a_linear_gaussian_policy_is_least_squares() -> None:
    draw = torch.Generator().manual_seed(1)
    bundle = GaussianBundle(observations=3, actions=2, width=4)
    state, actions = torch.randn(80, 3, generator=draw), torch.randn(80, 2, generator=draw)
    policy = bundle.trainable().double()
    assert isinstance(policy, GaussianPolicy)
    policy.encoder.scaled = lambda key, values: values.double()  # type: ignore[method-assign]
    layer = policy.output_layer
    smallest = minimised(bundle, batch_of(state, actions.double()), [layer.weight, layer.bias, policy.log_std])
    with torch.no_grad():
        features = torch.cat([policy.encoder({"state": state}), torch.ones(80, 1)], dim=1)
    solution = torch.linalg.lstsq(features, actions.double()).solution
    assert torch.allclose(torch.cat([layer.weight.T, layer.bias[None]]), solution, atol=1e-5)
    variance = (features @ solution - actions.double()).square().mean(0)
    assert torch.allclose(policy.log_std.exp() ** 2, variance, atol=1e-5)
    entropy = 0.5 * (2 * math.pi * math.e * variance).log().sum()  # the likelihood at its maximum
    assert smallest == pytest.approx(float(entropy), abs=1e-6)


def test_cloning_by_a_categorical_policy_gives_the_frequencies_of_actions() -> None:
    bundle = CategoricalBundle(observations=2, actions=3, width=8)
    state = torch.tensor([[1.0, 0.0]] * 10 + [[0.0, 1.0]] * 8)
    actions = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [0] * 1 + [1] * 1 + [2] * 6)
    policy = bundle.trainable()
    smallest = minimised(bundle, batch_of(state, actions), list(policy.parameters()))
    wanted = torch.tensor([[5, 3, 2], [1, 1, 6]]) / torch.tensor([[10], [8]])
    found = policy.parameters_of({"state": torch.eye(2)}).softmax(1)  # type: ignore[operator]
    assert torch.allclose(found, wanted, atol=1e-3)
    surprise = -(torch.tensor([[5, 3, 2], [1, 1, 6]]) * wanted.log()).sum() / 18
    assert smallest == pytest.approx(float(surprise), abs=1e-5)


def test_the_loss_of_a_squashed_policy_is_the_density_of_what_is_executed() -> None:
    bundle = GaussianBundle(observations=2, actions=2, squashed=True, width=4)
    state, actions = torch.randn(6, 2), torch.rand(6, 2) * 1.8 - 0.9
    mean, log_std = bundle.trainable().parameters_of({"state": state}).unbind(1)  # type: ignore[operator]
    wanted = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(actions).sum(1)
    loss = BehaviourCloning().transition_loss(bundle.stage(), batch_of(state, actions), torch.Generator()).loss
    assert loss.item() == pytest.approx(-wanted.mean().item(), rel=1e-4)


def test_the_loss_of_a_flow_policy_is_zero_at_the_velocity_of_the_one_demonstrated_action(monkeypatch) -> None:
    bundle = FlowBundle(observations=2, actions=2, chunk=3, width=4)
    policy, chunk = bundle.trainable(), torch.rand(3, 2)
    assert isinstance(policy, FlowPolicy)
    batch = batch_of(torch.randn(5, 2), torch.zeros(5))
    batch = Transitions.of_tensors(batch.tensors() | {"actions": chunk.expand(5, 3, 2)})

    def value() -> float:
        return BehaviourCloning().transition_loss(bundle.stage(), batch, torch.Generator().manual_seed(2)).loss.item()

    assert value() > 0.1
    # All noise flows to one point: x = (1 - sigma) a + sigma eps, so eps - a = (x - a) / sigma.
    monkeypatch.setattr(policy, "velocity", lambda features, x, sigma: (x - chunk.flatten()) / sigma[:, None])
    assert value() == pytest.approx(0.0, abs=1e-8)


def test_demonstrations_are_cut_into_chunks_within_episodes() -> None:
    stage = FlowBundle(observations=2, actions=2, chunk=3, width=4).stage()
    segment = toy_segment(stage.facts)
    found = BehaviourCloning().demonstrated(stage, segment, 1)
    wanted = [
        (t, segment.actions[t : t + 3])
        for row in range(len(segment))
        for t in range(int(segment.offsets[row]), int(segment.offsets[row + 1]))
        if t + 3 <= int(segment.offsets[row + 1]) and bool(segment.loss_mask[t : t + 3].all())
    ]
    assert len(found) == len(wanted) == 4 * 6
    assert torch.equal(found.actions, torch.stack([actions for _, actions in wanted]))
    assert torch.equal(found.observations["state"], segment.observations["state"][[t for t, _ in wanted]])


# DAgger


def lqr_pipeline(expert: Any = None) -> PolicyPipeline:
    bundle = GaussianBundle(observations=3, actions=1, width=8)
    return PolicyPipeline(bundle, env=GymnasiumEnvironment(id=LQR), expert=expert)


def stack_of(pipeline: PolicyPipeline, **settings: Any) -> ReplayStack:
    optimizer, fsdp = OptimizerConfig(learning_rate=1e-2), FSDPConfig(reduce_dtype="fp64")
    backend = FSDPBackend(pipeline.bundle, optimizer_cfg=optimizer, fsdp_cfg=fsdp)
    return ReplayStack(backend, BehaviourCloning(), pipeline.stage, **{"minibatch_size": 8, "warmup": 2} | settings)


def episode_of(env: GymnasiumEnvironment, expert: Damper, group: str, steps: int) -> ActionSegment:
    """An episode in which the expert acts, by a loop of its own."""
    seed = key_seed(42, NoiseSource(42, "r", 0).key(group, "start0"))
    seen = env.reset([0], [EpisodeStart(seed=seed)])
    states, actions, rewards = [seen["state"][0]], [], []
    for _ in range(steps):
        actions.append(expert.label(seen)[0])
        step = env.step([0], actions[-1][None])
        seen = step.observations
        states.append(seen["state"][0])
        rewards.append(step.rewards[0])
    return segment_of({"state": torch.stack(states)}, torch.stack(actions), torch.stack(rewards), False)


def test_dagger_with_beta_1_is_behaviour_cloning_of_the_experts_episodes(monkeypatch) -> None:
    dagger = lqr_pipeline(Damper())
    track = dagger.generate(request(4, max_steps=9, expert_share=1.0), 4).tracks["action"].sampled_as(ActionSegment)
    first = stack_of(dagger)
    first.train_track(track)

    episodes = [episode_of(GymnasiumEnvironment(id=LQR), Damper(), f"g{row}", 9) for row in range(4)]
    shown = ActionSegment.concat(episodes)
    assert torch.equal(track.segment.observations["state"], shown.observations["state"])
    monkeypatch.setattr("unirl.data.demonstrations.toy_segment", lambda facts: shown)
    second = stack_of(lqr_pipeline(), offline=DemonstrationsConfig(path="toy"), offline_share=1.0)
    second.train_track(track)
    weights = [dict(stack.backend.gather()) for stack in (first, second)]
    assert first.backend.version() == second.backend.version() == 36
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_expert_acts_with_probability_beta_and_labels_every_decision() -> None:
    env = Clocks(ContinuousActions(1))
    bundle = GaussianBundle(observations=2, actions=1)

    class Constant:
        def label(self, observations: Observations) -> Tensor:
            return torch.full((len(observations["state"]), 1), 0.125)

    policy = PolicyPipeline(bundle, env=env, expert=Constant())
    shares = {}
    for step in (0, 1, 2):
        env.actions.clear()
        made = policy.generate(request(200, step=step, expert_share=0.8, expert_decay=0.5), 200).tracks["action"]
        segment = made.sampled_as(ActionSegment).segment
        assert segment.labels is not None and bool((segment.labels[segment.loss_mask] == 0.125).all())
        executed = torch.cat(env.actions)
        shares[step] = float((executed == 0.125).double().mean())
        assert abs(shares[step] - 0.8 * 0.5**step) < 4 * math.sqrt(0.25 / len(executed))
    assert shares[0] > shares[1] > shares[2]


def test_without_a_share_the_rows_have_no_labels() -> None:
    made = lqr_pipeline(Damper()).generate(request(2, max_steps=4), 2).tracks["action"]
    assert made.sampled_as(ActionSegment).segment.labels is None


def test_a_trained_policy_is_an_expert(tmp_path) -> None:
    bundle = CategoricalBundle(observations=2, actions=3)
    bundle.write(tmp_path, dict(bundle.trainable().named_parameters()))
    state = torch.randn(9, 2)
    wanted = bundle.trainable().parameters_of({"state": state}).argmax(1)  # type: ignore[operator]
    assert torch.equal(PolicyExpert(path=str(tmp_path)).label({"state": state}), wanted)
    quick = PolicyExpert(path="quickstart").label({"state": torch.randn(3, 39)})
    assert quick.shape == (3, 4) and bool((quick.abs() <= 1).all())


def test_discrete_actions_are_labelled_and_executed() -> None:
    class Second:
        def label(self, observations: Observations) -> Tensor:
            return torch.ones(len(observations["state"]), dtype=torch.int64)

    env = Clocks(DiscreteActions(3))
    pipeline = PolicyPipeline(CategoricalBundle(observations=2, actions=3), env=env, expert=Second())
    track = pipeline.generate(request(3, expert_share=1.0), 3).tracks["action"]
    assert bool((torch.cat(env.actions) == 1).all())
    stack = stack_of(pipeline)
    before = float(stack.train_track(track).metrics["train/imitation_loss"].value)
    assert float(stack.train_track(track).metrics["train/imitation_loss"].value) < before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["pipeline.expert=null"], r"sampling.expert_share=1.0, and pipeline.expert is not. Set both"),
        (["sampling.expert_share=null"], "nothing is shown to it. Set pipeline.expert"),
        (
            ["bundle={_target_: unirl.models.policies.bundle.FlowBundle, observations: 39, actions: 4, chunk: 5}"],
            "says one action for each state, and the policy decides on 5 at a time",
        ),
        (
            ["algorithm={_target_: unirl.algorithms.sac.SAC}", "bundle.squashed=true"],
            "this loss learns from the actions of the policy itself",
        ),
        (["sampling.expert_decay=1.5"], "sampling.expert_decay must be between 0 and 1"),
    ],
)
def test_an_expert_that_nothing_learns_from_is_refused(overrides, says) -> None:
    with pytest.raises((IncompatibleError, ValueError), match=says):
        preflight(load("embodied/metaworld_reach_dagger", overrides))
