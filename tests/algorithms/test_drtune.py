"""Losses on the reward's gradient: the gradient by its formula, the choices that shape it, flows that learn by it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.algorithms.toys import GAUSSIAN
from tests.models.plain_sampling import assert_close, differentiable, euler, gradient_of, in_double, reward_of, velocity
from unirl.algorithms.drtune import AlignProp, DRaFT, DRaFTLV, DRTune, ReFL, RewardBackprop
from unirl.config.errors import ConfigError
from unirl.models.denoising.stage import GradientMask
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.sde.steps import AllSteps, EquallySpacedSteps, FractionSteps, LastSteps, RandomTail
from unirl.testing.algorithm import check_algorithm, prepared_track
from unirl.testing.toy import toy_params, toy_stage, toy_track
from unirl.types.protocols import Kernel
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

ODE = {"kernel": EulerODE(), "sde_indices": ()}
FAMILY: list[RewardBackprop] = [
    DRTune(gradient_steps=EquallySpacedSteps(num_steps=2)),
    ReFL(reward_weight=1.0),
    DRaFT(),
    DRaFT(gradient_steps=AllSteps()),
    DRaFTLV(),
    AlignProp(),
    RewardBackprop(gradient_steps=FractionSteps(high=1.0, num_steps=2), through_inputs=False, velocity_coef=0.5),
]


def name_of(algorithm: RewardBackprop) -> str:
    return f"{type(algorithm).__name__}-{type(algorithm.gradient_steps).__name__}"


def drawn(step: int = 0, num_steps: int = 5, **changes: object) -> RolloutTrack:
    """A rollout of `toy_stage()` without stochastic steps."""
    params = toy_params(num_inference_steps=num_steps, **(ODE | changes))  # type: ignore[arg-type]
    return toy_track(toy_stage(), params=params, step=step)


@cache
def one_row(num_steps: int) -> LatentSegment:
    segment: LatentSegment = drawn(num_steps=num_steps).slice(0, 1).segment
    return segment


def segment_at(step: int, num_steps: int) -> LatentSegment:
    """The fields of a segment that determine a gradient path."""
    return one_row(num_steps).replace(step=step)


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", FAMILY, ids=name_of)
@pytest.mark.parametrize("kernel", [EulerODE(), FlowSDEStrategy()], ids=lambda kernel: type(kernel).__name__)
def test_every_method_keeps_the_contract_of_a_loss(algorithm: RewardBackprop, kernel: Kernel) -> None:
    stage = toy_stage()
    steps = (0, 1, 3) if isinstance(kernel, FlowSDEStrategy) else ()
    track = toy_track(stage, params=toy_params(kernel, sde_indices=steps, guidance_scale=2.0))
    check_algorithm(algorithm, differentiable(stage), track)


def test_it_needs_a_gradient_of_the_reward_and_no_density() -> None:
    needs = DRTune().needs
    assert needs.differentiable_reward and not needs.density and needs.multi_update and needs.snapshots == ()
    assert DRTune(velocity_coef=0.1).needs.snapshots == ("reference",)


# --- the gradient, by an independent loop in float64 -----------------------------------------------------------------


def loss_gradient(algorithm: RewardBackprop, track: RolloutTrack) -> Tensor:
    """Gradient of the loss that the train stack differentiates."""
    stage = toy_stage()
    ready = prepared_track(algorithm, differentiable(stage), track)
    return gradient_of(stage.denoiser, algorithm.loss(differentiable(stage), ready, (0,)).loss)  # type: ignore[arg-type]


def weighed(track: RolloutTrack) -> RolloutTrack:
    return track.replace(weight=torch.linspace(0.0, 2.0, len(track)))


def test_drtune_sums_the_slopes_of_its_steps() -> None:
    track, network = weighed(drawn()), in_double(toy_stage())
    algorithm = DRTune(
        gradient_steps=EquallySpacedSteps(num_steps=2), early_stop=0.0, reward_weight=3.0, reward_std=0.5
    )
    steps = algorithm.gradient_path(track.segment).gradient.steps
    inputs: dict[int, Tensor] = {}
    with torch.no_grad():
        x0 = euler(network, track, enter=lambda i, x: inputs.setdefault(i, x))
    (dloss,) = torch.autograd.grad(-(3.0 / 0.5 * track.weight * reward_of(x0.requires_grad_(), track)).sum(), x0)
    sigmas, expected = track.segment.sigmas.double().tolist(), torch.zeros(())
    for i in steps:
        v = velocity(network, inputs[i], sigmas[i], track)
        expected = expected + gradient_of(network, -(sigmas[i] - sigmas[i + 1]) * (v * dloss).sum())
    assert_close(loss_gradient(algorithm, track), expected)


def test_draft_through_all_steps_is_backpropagation_through_sampling() -> None:
    track, network = weighed(drawn(guidance_scale=3.0)), in_double(toy_stage())
    x0 = euler(network, track, scale=3.0)
    expected = gradient_of(network, -(track.weight * reward_of(x0, track)).sum())
    assert_close(loss_gradient(DRaFT(gradient_steps=AllSteps()), track), expected)


def test_refl_scores_the_clean_prediction_of_one_late_step_under_its_ceiling() -> None:
    track, network = weighed(drawn(num_steps=8)), in_double(toy_stage())
    m = ReFL().gradient_path(track.segment).num_steps - 1
    sigmas = track.segment.sigmas.double().tolist()
    inputs: dict[int, Tensor] = {}
    with torch.no_grad():
        euler(network, track, enter=lambda i, x: inputs.setdefault(i, x))
    rewards = reward_of(inputs[m] - sigmas[m] * velocity(network, inputs[m], sigmas[m], track), track)
    mean = rewards.median().item() + 1e-3
    z = (rewards - mean) / 0.1
    assert 0 < int((z < 0).sum()) < len(track)
    expected = gradient_of(network, (track.weight * 2.0 * (0.0 - z) * (z < 0)).sum())
    algorithm = ReFL(reward_ceiling=0.0, reward_mean=mean, reward_std=0.1, reward_weight=2.0)
    assert_close(loss_gradient(algorithm, track), expected)


def test_draft_lv_averages_the_last_step_over_its_copies() -> None:
    track, network = weighed(drawn()), in_double(toy_stage())
    with torch.no_grad():
        x0 = euler(network, track)
    total, sigma = torch.zeros(()), float(track.segment.sigmas[-2])
    inputs: dict[int, Tensor] = {}
    with torch.no_grad():
        euler(network, track, enter=lambda i, x: inputs.setdefault(i, x))
    noise = NoiseSource(track.segment.seed, "r", 0)
    copies = [(1 - sigma) * x0 + sigma * noise.normal(track.sample_ids, f"t{j}", (3, 4, 4)).double() for j in (1, 2)]
    for x in (inputs[4], *copies):
        clean = x - sigma * velocity(network, x, sigma, track)
        total = total - (track.weight * reward_of(clean, track)).sum() / 3
    assert_close(loss_gradient(DRaFTLV(), track), gradient_of(network, total))


def test_copies_lower_the_variance_of_the_gradient_and_keep_its_direction() -> None:
    def spread(algorithm: RewardBackprop) -> tuple[Tensor, Tensor]:
        actual = torch.stack([loss_gradient(algorithm, drawn(step).slice(0, 1)) for step in range(24)])
        return actual.mean(0), actual.var(0).sum()

    (one, variance), (many, less) = spread(DRaFT()), spread(DRaFTLV(extra_copies=7))
    assert less < 0.7 * variance
    assert torch.cosine_similarity(one, many, dim=0) > 0.7


def test_the_velocity_penalty_is_the_squared_distance_from_the_reference() -> None:
    track, network, reference = weighed(drawn()), in_double(toy_stage()), in_double(toy_stage(seed=1))
    plain, held = DRTune(early_stop=0.0, gradient_steps=LastSteps()), None
    held = dataclasses.replace(plain, velocity_coef=0.7)
    other = differentiable(toy_stage(seed=1))
    column = other.velocity(track).detach()[:, None]
    anchored = track.replace(segment=track.segment.replace(anchors={"ref_velocity": column}))
    stage, expected = toy_stage(), torch.zeros(())
    result = held.loss(differentiable(stage), anchored, (0,))
    noise = NoiseSource(track.segment.seed, "r", 0)
    for row, sample_id in enumerate(track.sample_ids):
        t = float(noise.uniform([sample_id], "t", ()))
        x = (1 - t) * track.segment.final[row] + t * noise.normal([sample_id], "t0", (3, 4, 4))[0]
        one, two = (velocity(net, x[None].double(), t, track.select([row])) for net in (network, reference))
        expected = expected + 0.7 * track.weight[row] * (one - two.detach()).square().mean()
    actual = gradient_of(stage.denoiser, result.loss)  # type: ignore[arg-type]
    assert_close(actual - loss_gradient(plain, track), gradient_of(network, expected))
    assert values(result.metrics)["train/velocity_mse"] > 0


# --- shapes of the reward --------------------------------------------------------------------------------------------


def test_a_reward_above_the_ceiling_has_no_gradient_at_all() -> None:
    track = drawn()
    algorithm = ReFL(reward_ceiling=-10.0)
    result = algorithm.loss(differentiable(toy_stage()), track, (0,))
    assert result.loss == 0 and values(result.metrics)["train/saturated_fraction"] == 1.0
    assert loss_gradient(algorithm, track).abs().max() == 0.0
    assert loss_gradient(ReFL(reward_ceiling=10.0), track).abs().max() > 0.0
    published = 2.0 - float(reward_of(drawn().segment.final, track).min())
    for shift, silent in ((published + 1.0, True), (0.0, False)):  # the ceiling of ImageReward is 2
        assert (loss_gradient(ReFL(reward_mean=-shift), track).abs().max() == 0.0) == silent


def test_the_loss_is_the_weighted_reward_and_the_metric_the_raw_reward() -> None:
    track = drawn()
    rewards = reward_of(track.segment.final, track)
    result = DRaFT(reward_weight=2.0, reward_mean=0.25, reward_std=0.5).loss(differentiable(toy_stage()), track, (0,))
    torch.testing.assert_close(result.loss, -(2.0 * (rewards - 0.25) / 0.5).sum())
    actual = values(result.metrics)
    assert actual["train/reward_mean"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert actual["train/denoising_steps"] == 5.0 and "train/saturated_fraction" not in actual


# --- random choices are shared, and pure functions of seed and step --------------------------------------------------


def test_the_gradient_path_depends_on_seed_and_step_alone() -> None:
    algorithm = DRTune(gradient_steps=EquallySpacedSteps(num_steps=3))
    whole = drawn(step=7, num_steps=20)
    assert algorithm.gradient_path(whole.segment) == algorithm.gradient_path(whole.select([5, 1]).segment)
    routes = {algorithm.gradient_path(segment_at(step, 20)) for step in range(40)}
    assert len(routes) > 20
    other = [algorithm.gradient_path(segment_at(step, 20).replace(seed=1)) for step in range(40)]
    assert other != [algorithm.gradient_path(segment_at(step, 20)) for step in range(40)]


def test_drtune_of_the_paper_stops_in_the_last_20_of_50_steps_and_spaces_5_of_those_before() -> None:
    routes = [DRTune().gradient_path(segment_at(step, 50)) for step in range(400)]
    assert {route.num_steps for route in routes} == set(range(31, 51))
    for route in routes:
        steps, interval = route.gradient.steps, route.num_steps // 5
        assert {b - a for a, b in pairwise(steps)} == {interval} and len(steps) == 5
        assert steps[0] >= 0 and steps[-1] < route.num_steps and not route.gradient.through_inputs


def test_refl_takes_one_step_of_the_last_quarter_evenly() -> None:
    routes = [ReFL().gradient_path(segment_at(step, 40)) for step in range(1000)]
    counts = Counter(route.gradient.steps for route in routes)
    assert set(counts) == {(m,) for m in range(30, 40)}  # 30 to 39 of 40, as published
    assert all(70 <= count <= 130 for count in counts.values())
    assert all(route.num_steps == route.gradient.steps[0] + 1 for route in routes)


def test_draft_takes_the_last_steps_and_alignprop_all_from_a_random_one_on() -> None:
    assert DRaFT(gradient_steps=LastSteps(num_steps=3)).gradient_path(segment_at(4, 10)).gradient == GradientMask(
        steps=(7, 8, 9)
    )
    assert DRaFT(gradient_steps=LastSteps(num_steps=10)).gradient_path(segment_at(4, 10)).gradient.steps == tuple(
        range(10)
    )
    tails = {AlignProp().gradient_path(segment_at(step, 10)).gradient.steps for step in range(200)}
    assert tails == {tuple(range(first, 10)) for first in range(10)}
    late = {
        AlignProp(gradient_steps=RandomTail(low=0.7)).gradient_path(segment_at(s, 10)).gradient.steps[0]
        for s in range(99)
    }
    assert late == {7, 8, 9}


def test_the_choice_of_gradient_steps_does_not_repeat_that_of_stochastic_steps() -> None:
    choice = FractionSteps(high=1.0, num_steps=2)
    trained = [
        RewardBackprop(gradient_steps=choice).gradient_path(segment_at(step, 9)).gradient.steps for step in range(20)
    ]
    assert trained != [choice.choose(step, 10, 42) for step in range(20)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DRTune(early_stop=1.0), r"algorithm.early_stop must lie in \[0, 1\), got 1"),
        (lambda: DRTune(early_stop=-0.1), "algorithm.early_stop"),
        (lambda: DRaFTLV(extra_copies=-1), "algorithm.extra_copies must be >= 0, got -1"),
        (lambda: ReFL(reward_weight=0.0), "algorithm.reward_weight must be finite and > 0, got 0"),
        (lambda: ReFL(reward_std=float("inf")), "algorithm.reward_std must be finite and > 0"),
        (lambda: ReFL(reward_ceiling=float("nan")), "algorithm.reward_ceiling must be finite"),
        (lambda: DRaFT(velocity_coef=-1.0), "algorithm.velocity_coef must be finite and >= 0"),
    ],
)
def test_a_key_out_of_range_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make()  # type: ignore[operator]
    assert caught.value.code == 2004


def test_more_steps_than_the_shortest_run_has_are_refused() -> None:
    sampling = DiffusionSamplingParams(kernel=EulerODE(), num_inference_steps=8)
    DRTune().check_sampling(sampling)  # stops after 6 at the earliest
    with pytest.raises(ConfigError, match=r"needs 7 .* takes 6 of the 8 denoising steps .*early_stop=0.4") as caught:
        DRTune(gradient_steps=EquallySpacedSteps(num_steps=7)).check_sampling(sampling)
    assert caught.value.code == 2004


# --- learning --------------------------------------------------------------------------------------------------------


LEARNERS: dict[str, tuple[RewardBackprop, int]] = {  # and updates per rollout
    "DRTune": (DRTune(gradient_steps=EquallySpacedSteps(num_steps=3)), 1),
    "DRTune, 2 updates": (DRTune(gradient_steps=EquallySpacedSteps(num_steps=3)), 2),
    "ReFL": (ReFL(reward_ceiling=0.0), 1),
    "DRaFT, K 1": (DRaFT(), 1),
    "DRaFT, K 3": (DRaFT(gradient_steps=LastSteps(num_steps=3)), 1),
    "DRaFT, K T": (DRaFT(gradient_steps=AllSteps()), 1),
    "DRaFT-LV": (DRaFTLV(), 1),
    "AlignProp": (AlignProp(), 1),
    "two steps of any": (RewardBackprop(gradient_steps=FractionSteps(high=1.0, num_steps=2)), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_every_method_brings_a_gaussian_flow_near_its_optimum(name: str) -> None:
    algorithm, num_updates = LEARNERS[name]
    run = GAUSSIAN.learn_by_gradient(algorithm, 30, num_updates)
    assert run.rewards[0] == pytest.approx(GAUSSIAN.start, abs=0.3)
    assert run.end > -0.1


@pytest.mark.slow
def test_a_velocity_penalty_keeps_the_policy_near_the_reference() -> None:
    free, held = DRTune(gradient_steps=EquallySpacedSteps(num_steps=3)), None
    held = dataclasses.replace(free, velocity_coef=10.0)
    last = [GAUSSIAN.learn_by_gradient(algorithm, 40).end for algorithm in (free, held)]
    assert last[0] > -0.2 and last[1] < -0.6
