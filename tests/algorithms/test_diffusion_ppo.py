"""PPO on denoising steps with a critic: against its equations in float64, its anchors, and what its critic learns."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.flows import FLOW_SDE, GROUP, PROMPTS, SIBLINGS, Flow, Method, T, rollout
from tests.algorithms.toys import GAUSSIAN
from tests.algorithms.trajectories import (
    IMAGE,
    VIDEO,
    Policies,
    Step,
    anchored,
    assert_same,
    loss_and_gradient,
    policies,
)
from tests.algorithms.trajectories import expected as expected_policy
from tests.algorithms.trajectories import trajectory as unscored
from tests.toy import ToyBundle
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.config.errors import ConfigError
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.value_head import ValueHead
from unirl.sde.kernels import EulerODE
from unirl.testing.algorithm import check_algorithm
from unirl.testing.toy import toy_facts, toy_stage, toy_track
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.stack import TrainStack
from unirl.types.protocols import Anchor
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

STEPS = (0, 1, 3)


def head(seed: int, scale: float = 0.3) -> ValueHead:
    """A value head that does not say zero."""
    made = ValueHead.of(toy_facts(), width=6, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    made.output_layer.weight.data = scale * torch.randn(1, 6, generator=generator)
    return made


def critics(latent: tuple[int, ...]) -> Policies:
    """Three policies; the trained one's value head is a little apart from the others'."""
    named = policies(latent)
    named.new.value_head, named.old.value_head, named.reference.value_head = head(0), head(0), head(0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in named.new.value_head.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return named


def trajectory(stage: DiffusionStage, latent: tuple[int, ...]) -> RolloutTrack:
    """A rollout with random advantages and other random rewards."""
    track = unscored(stage, latent)
    return track.replace(rewards=torch.randn(len(track), generator=torch.Generator().manual_seed(1)))


def predicted_values(value_head: ValueHead | None, track: RolloutTrack) -> Tensor:
    """[B, S] float64 values at the states before the stochastic steps, one state at a time."""
    double, segment = copy.deepcopy(value_head).double(), track.segment
    assert double is not None
    text = track.conditions["text"].pooled.double()
    return torch.stack(
        [double(segment.latents_at(i).double(), segment.sigmas[i].double().expand(len(track)), text) for i in STEPS], 1
    )


def advantages_of(outcome: Tensor, old: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE backwards over the steps, with the outcome after the last and nothing beyond."""
    columns, carried, following = [], torch.zeros(len(outcome)).double(), torch.zeros(len(outcome)).double()
    for s in reversed(range(old.shape[1])):
        reward = outcome if s == old.shape[1] - 1 else torch.zeros_like(outcome)
        carried = reward + gamma * following - old[:, s] + gamma * lam * carried
        following = old[:, s]
        columns.append(carried)
    return torch.stack(columns[::-1], 1)


# The equations


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9, "lam": 0.7, "outcome": "rewards", "value_clip": 0.05, "steps_per_forward": 2},
    {"lam": 1.0, "value_clip": None, "vf_coef": 2.0, "steps_per_forward": 3},
    {"lam": 1.0, "outcome": "rewards", "kl_coef": 0.3, "clip_range": 0.9},  # DPOK
]


@pytest.mark.parametrize("latent", [IMAGE, VIDEO], ids=["image", "video"])
@pytest.mark.parametrize("options", OPTIONS, ids=["default", "discounted", "unclipped", "dpok"])
def test_off_policy_loss_and_gradients_are_those_of_the_equations(
    options: dict[str, Any], latent: tuple[int, ...]
) -> None:
    algorithm, named = DiffusionPPO(**{"clip_range": 2e-3} | options), critics(latent)
    track = trajectory(named.old, latent)
    clip, vclip, coef = algorithm.clip_range, algorithm.value_clip, algorithm.vf_coef
    outcome = (track.rewards if algorithm.outcome == "rewards" else track.advantages).double()
    old = predicted_values(named.old.value_head, track).detach()
    advantages = advantages_of(outcome, old, algorithm.gamma, algorithm.lam)
    per_step = iter(advantages.unbind(1))

    def policy_loss(step: Step) -> Tensor:
        a, ratio = next(per_step), (step.new.logp - step.old.logp.detach()).exp()
        kl = (step.new.mean - step.reference.mean.detach()).square().flatten(1).mean(1) / (2 * step.std**2)
        return torch.max(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)) + algorithm.kl_coef * kl

    want = expected_policy(named, track, policy_loss)
    twin = copy.deepcopy(named.new.value_head)
    assert twin is not None
    twin.double()
    v, target = predicted_values(twin, track), advantages + old
    error = (v - target).square()
    if vclip is not None:
        error = torch.max(error, (torch.min(torch.max(v, old - vclip), old + vclip) - target).square())
    want_value = coef * 0.5 * error.sum()
    # `predicted_values` copies the head that it is given, so the gradient is taken with respect to that copy.
    have = loss_and_gradient(algorithm, named.new, anchored(algorithm, named, track))
    assert_same(replace(have, loss=have.loss - want_value.item()), want)
    assert_head_gradient(named.new.value_head, track, target, old, vclip, coef)


def assert_head_gradient(
    value_head: ValueHead | None, track: RolloutTrack, target: Tensor, old: Tensor, clip: float | None, coef: float
) -> None:
    assert value_head is not None
    twin, segment, text = copy.deepcopy(value_head).double(), track.segment, track.conditions["text"].pooled.double()
    twin.zero_grad()
    total = torch.zeros(()).double()
    for s, i in enumerate(STEPS):
        for b in range(len(track)):
            row = slice(b, b + 1)
            v = twin(segment.latents_at(i)[row].double(), segment.sigmas[i].double()[None], text[row])[0]
            plain = (v - target[b, s]) ** 2
            bounded = v if clip is None else min(max(v, old[b, s] - clip), old[b, s] + clip)
            total = total + coef * max(plain, (bounded - target[b, s]) ** 2) / 2
    total.backward()
    for have, wanted in zip(value_head.parameters(), twin.parameters(), strict=True):
        assert (have.grad - wanted.grad).abs().max() < 1e-5 * max(1.0, float(wanted.grad.abs().max()))


def test_without_discount_the_advantage_is_the_outcome_minus_each_value() -> None:
    named = critics(IMAGE)
    track = trajectory(named.old, IMAGE)
    algorithm = DiffusionPPO(lam=1.0, outcome="rewards")
    rows = algorithm.with_old_values(named.old, track)
    wanted = track.rewards[:, None] - named.old.values(track.conditions, track.segment, STEPS)
    assert torch.allclose(algorithm.element_advantages(rows, STEPS), wanted, atol=1e-6)
    assert torch.allclose(algorithm.element_advantages(rows, (3, 0)), wanted[:, [2, 0]], atol=1e-6)


def test_with_a_head_of_zeros_earlier_steps_get_discounted_advantages() -> None:
    stage = toy_stage()
    stage.value_head = head(0, scale=0.0)
    track = toy_track(stage)
    algorithm = DiffusionPPO(gamma=0.5, lam=0.8)
    result = algorithm.element_advantages(algorithm.with_old_values(stage, track), STEPS)
    assert torch.allclose(result, track.advantages[:, None] * 0.4 ** torch.tensor([2.0, 1.0, 0.0]))


# The contract of losses


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "discounted", "unclipped", "dpok"])
@pytest.mark.parametrize("source", ["replay", "rollout"])
def test_it_keeps_the_contract_of_losses(options: dict[str, Any], source: Any) -> None:
    stage = toy_stage()
    stage.value_head = head(0)
    check_algorithm(
        DiffusionPPO(**{"clip_range": 1e-3} | options, old_logp_source=source), stage, toy_track(stage, prompts=2)
    )


@pytest.mark.parametrize("steps_per_forward", [1, 2, 3])
def test_in_the_first_update_ratio_and_value_are_exactly_those_that_sampled(steps_per_forward: int) -> None:
    stage = toy_stage()
    stage.value_head = head(0)
    track = toy_track(stage)
    algorithm = DiffusionPPO(steps_per_forward=steps_per_forward, value_clip=1e-9)
    metrics = values(algorithm.compute_loss_and_backward(stage, track, lambda loss, last: loss.backward()))
    assert (metrics["train/ratio_mean"], metrics["train/ratio_std"], metrics["train/clip_fraction"]) == (1.0, 0.0, 0.0)
    assert metrics["train/value_clip_fraction"] == 0.0
    with torch.no_grad():
        segment, _ = algorithm.prepare_segment(stage, track, "live")
    own = algorithm.with_old_values(stage, track).segment.anchors["old_value"]
    assert torch.equal(segment.anchors["old_value"], own)


@pytest.mark.parametrize("shift", [0.3, -0.3])
def test_values_that_moved_further_than_the_clip_are_counted_on_either_side(shift: float) -> None:
    stage = toy_stage()
    stage.value_head = head(0)
    algorithm = DiffusionPPO(value_clip=0.2)
    rows = algorithm.with_old_values(stage, toy_track(stage))
    moved = rows.segment.anchors["old_value"].clone()
    moved[:2] += shift
    rows = rows.replace(segment=rows.segment.replace(anchors={**rows.segment.anchors, "old_value": moved}))
    metrics = values(algorithm.compute_loss_and_backward(stage, rows, lambda loss, last: loss.backward()))
    assert metrics["train/value_clip_fraction"] == pytest.approx(2 / len(rows))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_of_weight_zero_change_no_gradient_even_if_they_are_not_finite(bad: float) -> None:
    named = critics(IMAGE)
    track = trajectory(named.old, IMAGE)
    weight, rewards = torch.ones(len(track)), track.rewards.clone()
    weight[2], rewards[2] = 0.0, bad
    kept = [i for i in range(len(track)) if i != 2]
    algorithm = DiffusionPPO(outcome="rewards", clip_range=0.1)
    gradients = []
    for rows in (track.replace(weight=weight, rewards=rewards, advantages=rewards), track.select(kept)):
        named.new.value_head.zero_grad()
        policy = loss_and_gradient(algorithm, named.new, rows)
        gradients.append([policy.gradient, *(p.grad.clone() for p in named.new.value_head.parameters())])
        assert all(torch.tensor(value).isfinite() for value in policy.metrics.values())
    for have, want in zip(*gradients, strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def caught(micro_batch_size: int, steps_per_forward: int) -> list[Tensor]:
    """The gradients of one update of a stack, policy and head."""
    bundle = ToyBundle()
    backend = FSDPBackend(
        bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), value_cfg=ValueConfig(width=6, learning_rate=1e-3)
    )
    stage = bundle.stage()
    algorithm = DiffusionPPO(clip_range=0.1, outcome="rewards", steps_per_forward=steps_per_forward)
    stack = TrainStack(backend, algorithm, stage, micro_batch_size=micro_batch_size)
    stage.value_head.load_state_dict(head(0).state_dict())
    gradients: list[Tensor] = []
    step = backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        gradients.extend(p.grad.clone() for layout in backend.layouts for p in layout.shards.values())
        return step(max_grad_norm, loss)

    backend.step = catching  # type: ignore[method-assign]
    stack.train_track(toy_track(stage, prompts=3))
    return gradients


@pytest.mark.parametrize(("micro_batch_size", "steps_per_forward"), [(1, 1), (5, 2), (12, 3)])
def test_gradients_do_not_depend_on_micro_batches_or_parts(micro_batch_size: int, steps_per_forward: int) -> None:
    for have, want in zip(caught(micro_batch_size, steps_per_forward), caught(12, 1), strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=2e-6 * float(want.abs().max()))


def test_the_head_is_evaluated_twice_per_step_for_any_number_of_parts() -> None:
    stage = toy_stage()
    stage.value_head = head(0)
    asked: list[int] = []
    stage.value_head.register_forward_hook(lambda module, inputs, output: asked.append(len(output)))
    track = toy_track(stage)
    DiffusionPPO().compute_loss_and_backward(stage, track, lambda loss, last: loss.backward())
    assert sum(asked) == 2 * len(STEPS) * len(track)  # once for the advantages, once to be trained


def test_the_second_update_reads_values_from_before_the_first() -> None:
    bundle = ToyBundle()
    backend = FSDPBackend(
        bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-4), value_cfg=ValueConfig(width=6, learning_rate=0.3)
    )
    stage = bundle.stage()
    algorithm = DiffusionPPO(clip_range=0.1, value_clip=0.1)
    stack = TrainStack(backend, algorithm, stage, micro_batch_size=4, num_updates_per_batch=2)
    first, second = (values(update) for update in stack.train_track(toy_track(stage)).updates)
    assert first["train/value_clip_fraction"] == 0.0 and second["train/value_clip_fraction"] > 0.5
    assert second["train/ratio_std"] > 0


def test_needs_and_anchors() -> None:
    algorithm = DiffusionPPO()
    assert algorithm.needs.value and algorithm.needs.multi_update and not DiffusionGRPO().needs.value
    assert algorithm.anchors() == {"old_logp": Anchor("live", "logp"), "old_value": Anchor("live", "value")}
    recorded = DiffusionPPO(old_logp_source="rollout", kl_coef=0.1)
    assert recorded.anchors() == {"ref_mean": Anchor("reference", "mean"), "old_value": Anchor("live", "value")}
    assert recorded.needs.snapshots == ("reference",) and recorded.needs.behaviour_logp


@pytest.mark.parametrize(
    "options",
    [
        {"lam": -0.1},
        {"lam": 1.5},
        {"gamma": 1.1},
        {"vf_coef": 0.0},
        {"value_clip": 0.0},
        {"value_huber": 0.0},
        {"clip_range": 0.0},
        {"kl_in": "reward", "kl_coef": 0.1},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{next(iter(options))}"):
        DiffusionPPO(**options)


# Learning


CRITICS = {
    "default": DiffusionPPO(clip_range=0.05, steps_per_forward=T - 1),
    "td": DiffusionPPO(clip_range=0.05, steps_per_forward=T - 1, lam=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CRITICS)
def test_it_moves_a_gaussian_flow_towards_its_reward(name: str) -> None:
    run = GAUSSIAN.learn(Method(algorithm=CRITICS[name]), steps=25)
    assert run.rewards[0] == pytest.approx(GAUSSIAN.start, abs=0.3)
    assert run.gain() >= 0.5  # the optimum is 0


def true_values(flow: Flow, sigmas: tuple[float, ...], track: RolloutTrack) -> Tensor:
    """[B, S] E[R | x_i]: every step is linear, x' = g x + std z, so x0 given x_i is a Gaussian."""
    slopes, stds = [], []
    for i in range(T):
        kernel = FLOW_SDE if i < T - 1 else EulerODE()
        ends = []
        for level in (0.0, 1.0):
            x = torch.full((1, 8), level)
            ends.append(kernel.transition(x, flow.base(x, torch.tensor([[sigmas[i]]])), sigmas[i], sigmas[i + 1]))
        slopes.append(float((ends[1].mean - ends[0].mean)[0, 0]))
        stds.append(float(ends[0].std) if i < T - 1 else 0.0)
    columns = []
    for i in range(T - 1):
        slope, variance = 1.0, 0.0
        for j in range(i, T):
            slope, variance = slope * slopes[j], slopes[j] ** 2 * variance + stds[j] ** 2
        columns.append(-((slope * track.segment.latents_at(i) - 1).square().mean(1) + variance))
    return torch.stack(columns, 1)


def explained(wanted: Tensor, have: Tensor) -> float:
    return 1 - float((wanted - have).var() / wanted.var())


@pytest.mark.slow
def test_its_value_head_learns_the_expected_reward_of_every_state() -> None:
    """On a policy that stands still the expected reward is known in closed form; the head sees noisy outcomes only."""
    flow = GAUSSIAN.flow()
    backend = FSDPBackend(
        flow,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-12),
        value_cfg=ValueConfig(learning_rate=5e-3, width=32),
    )
    stage = DiffusionStage(flow, flow.facts)
    algorithm = DiffusionPPO(clip_range=0.05, lam=1.0, outcome="rewards", value_clip=None, steps_per_forward=T - 1)
    stack = TrainStack(backend, algorithm, stage, micro_batch_size=PROMPTS * SIBLINGS, num_updates_per_batch=4)
    sigmas = tuple(flow.facts.schedule.sigmas(T, 1).tolist())
    params = DiffusionSamplingParams(kernel=FLOW_SDE, num_inference_steps=T).pinned(0, sigmas)
    updates: list[dict[str, float]] = []
    for step in range(30):
        track = rollout(stage, 8, params, step)
        track, _ = track.replace(rewards=GAUSSIAN.reward(track.segment.final)).compute_advantages(GROUP)
        updates += [values(update) for update in stack.train_track(track).updates]
    unseen = rollout(stage, 8, params, 1000)
    truth = true_values(flow, sigmas, unseen)
    rewards = GAUSSIAN.reward(unseen.segment.final)
    assert abs(float((rewards[:, None] - truth).mean())) < 0.1  # the closed form is that of this flow
    with torch.no_grad():
        have = stage.values(unseen.conditions, unseen.segment, unseen.segment.sde_indices)
    assert explained(truth, have) > 0.85
    assert all(explained(truth[:, i], have[:, i]) > 0.6 for i in range(1, T - 1))

    def share(some: list[dict[str, float]]) -> float:
        return sum(1 - (u["train/value_error_std"] / u["train/return_std"]) ** 2 for u in some) / len(some)

    # Of outcomes rather than expectations the early states explain nothing, so the bound is low.
    assert share(updates[:4]) < 0.05 and share(updates[-40:]) > 0.1
