"""What losses on clean samples share: training times, noise that follows the sample, the velocity that is trained."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.algorithms.clean_samples import (
    SHAPES,
    SIGMAS,
    T,
    all_noised,
    assert_close,
    clean_track,
    field_stage,
    gradient,
    velocity64,
    weights64,
)
from unirl.algorithms.base import START, LossResult, Part
from unirl.algorithms.shared.forward_process import ForwardProcessLoss, mean_square
from unirl.algorithms.shared.surrogate import weighted_sum
from unirl.algorithms.shared.training_times import LogitNormalTimes, ScheduleTimes, TrainingTimes, UniformTimes
from unirl.config.errors import ConfigError
from unirl.models.denoising.stage import DiffusionStage
from unirl.sde.guidance import Guidance
from unirl.sde.noise import NoiseSource
from unirl.testing.algorithm import check_algorithm
from unirl.testing.toy import toy_params, toy_stage, toy_track
from unirl.types.protocols import TrainingProgress
from unirl.types.rollout_resp import RolloutTrack

NOISE = NoiseSource(11, "r", 3)
MANY = [f"p{i}@0:0" for i in range(4000)]
WAYS: list[TrainingTimes] = [
    ScheduleTimes(),
    ScheduleTimes(fraction=1.0, num_times=3),
    ScheduleTimes(fraction=0.8, num_times=2, stratified=True, skip_first=True),
    ScheduleTimes(shared=True),
    UniformTimes(num_times=3),
    UniformTimes(num_times=3, low=0.2, high=0.7, stratified=True),
    LogitNormalTimes(num_times=3, stratified=False),
    LogitNormalTimes(num_times=3, shift=3.0, shared=True),
]


@dataclass(frozen=True, kw_only=True)
class Matching(ForwardProcessLoss):
    """The plainest of these losses: regression to all samples."""

    def loss(self, stage: DiffusionStage, rows: RolloutTrack, part: Part, now: TrainingProgress = START) -> LossResult:
        noised = self.noised(rows, part)
        v = self.velocity(stage, rows, noised)
        error = self.element_advantages(rows, part) * mean_square(v, noised.target)
        return LossResult(weighted_sum(error, self.weights(rows, part)), {}, {"velocity": v.detach()})


def largest_gap(values: Tensor, quantiles: Tensor) -> float:
    """The Kolmogorov-Smirnov distance, from the true distribution function at each value, sorted."""
    order = quantiles[values.argsort()]
    steps = torch.arange(len(values) + 1) / len(values)
    return float(torch.maximum((order - steps[:-1]).abs(), (order - steps[1:]).abs()).max())


# Times


def test_the_schedule_gives_every_level_but_the_last_once_per_sample_in_its_own_order() -> None:
    times = ScheduleTimes(fraction=1.0).draw(SIGMAS, NOISE, MANY[:50])
    assert all(sorted(row, reverse=True) == SIGMAS[:-1].tolist() for row in times.tolist())
    assert len({tuple(row) for row in times.tolist()}) > 30  # of 120 orders


def test_a_fraction_keeps_the_noisy_end_of_the_schedule() -> None:
    def levels(times: ScheduleTimes) -> list[float]:
        return sorted({float(t) for row in times.draw(SIGMAS, NOISE, MANY[:50]) for t in row}, reverse=True)

    known = SIGMAS.tolist()
    assert levels(ScheduleTimes()) == known[:4]  # floor(0.99 x 5)
    assert levels(ScheduleTimes(fraction=0.6)) == known[:3]
    assert levels(ScheduleTimes(fraction=0.6, skip_first=True)) == known[1:3]
    assert levels(ScheduleTimes(fraction=0.01)) == known[:1]
    assert [ScheduleTimes(fraction=0.6).count(n) for n in (5, 10, 15, 20)] == [3, 6, 9, 12]
    assert [ScheduleTimes(fraction=0.9, num_times=6).count(n) for n in (1, 4, 10, 25)] == [1, 3, 6, 6]


def test_fewer_times_than_levels_are_drawn_without_repeats_and_evenly() -> None:
    times = ScheduleTimes(fraction=1.0, num_times=2).draw(SIGMAS, NOISE, MANY)
    assert (times[:, 0] != times[:, 1]).all()
    counts = [(times == level).sum().item() for level in SIGMAS[:-1]]
    assert all(abs(count - 2 * 4000 / 5) < 150 for count in counts)  # four standard deviations


def test_stratified_levels_come_one_from_each_range() -> None:
    sigmas = torch.linspace(1, 0, 11)
    times = ScheduleTimes(fraction=1.0, num_times=4, stratified=True).draw(sigmas, NOISE, MANY)
    index = (10 * (1 - times)).round().long()
    for j, (start, stop) in enumerate([(0, 2), (2, 5), (5, 7), (7, 10)]):
        counts = torch.bincount(index[:, j] - start, minlength=stop - start)
        assert counts.sum() == 4000 and len(counts) == stop - start
        assert (counts - 4000 / (stop - start)).abs().max() < 200


def test_uniform_times_are_uniform_within_their_bounds() -> None:
    times = UniformTimes(num_times=2, low=0.25, high=0.75).draw(SIGMAS, NOISE, MANY).double()
    for column in times.T:
        assert largest_gap(column, (column - 0.25) / 0.5) < 1.63 / math.sqrt(4000)  # 1 % level
    assert abs(float(torch.corrcoef(times.T)[0, 1])) < 0.06


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_logit_normal_times_have_that_distribution(shift: float) -> None:
    ways = LogitNormalTimes(num_times=1, mean=0.5, std=1.5, shift=shift, stratified=False)
    times = ways.draw(SIGMAS, NOISE, MANY)[:, 0].double()
    unshifted = times / (shift - (shift - 1) * times)
    normal = torch.distributions.Normal(torch.tensor(0.5).double(), 1.5)
    assert largest_gap(times, normal.cdf(torch.logit(unshifted))) < 1.63 / math.sqrt(4000)


def test_stratified_times_come_one_from_each_part_of_equal_probability() -> None:
    uniform = UniformTimes(num_times=4, stratified=True).draw(SIGMAS, NOISE, MANY)
    assert ((4 * uniform).floor() == torch.arange(4)).all()
    normal = torch.distributions.Normal(torch.zeros(()), 1.0)
    quantiles = normal.cdf(torch.logit(LogitNormalTimes(num_times=4).draw(SIGMAS, NOISE, MANY).double()))
    assert ((4 * quantiles + 1e-6).floor() == torch.arange(4)).float().mean() > 0.9999


def test_shared_times_are_those_of_all_samples_of_a_step_and_others_are_each_samples_own() -> None:
    shared = UniformTimes(shared=True).draw(SIGMAS, NOISE, MANY[:5])
    assert (shared == shared[0]).all()
    assert len({tuple(row) for row in UniformTimes().draw(SIGMAS, NOISE, MANY[:5]).tolist()}) == 5
    assert not torch.equal(shared, UniformTimes(shared=True).draw(SIGMAS, NoiseSource(11, "r", 4), MANY[:5]))


@pytest.mark.parametrize("ways", WAYS, ids=repr)
def test_times_lie_within_the_unit_interval_and_match_their_count(ways: TrainingTimes) -> None:
    times = ways.draw(SIGMAS, NOISE, MANY)
    assert times.shape == (4000, ways.count(T)) and times.dtype == torch.float32
    assert ((times >= 0) & (times <= 1)).all()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (ScheduleTimes, {"fraction": 0.0}, "times.fraction"),
        (ScheduleTimes, {"fraction": 1.1}, "times.fraction"),
        (ScheduleTimes, {"num_times": 0}, "times.num_times"),
        (UniformTimes, {"num_times": 0}, "times.num_times"),
        (UniformTimes, {"low": 0.5, "high": 0.5}, "times.low"),
        (LogitNormalTimes, {"std": 0.0}, "times.std"),
        (LogitNormalTimes, {"shift": -1.0}, "times.shift"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        kind(**options)
    assert error.value.code == 2004


def test_an_empty_fraction_of_the_schedule_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"nothing to draw from: fraction=0.2 of 5 denoising steps is the first"):
        ScheduleTimes(fraction=0.2, skip_first=True).count(5)
    assert ScheduleTimes(fraction=0.2).count(5) == 1


# Times and noise of rows


@pytest.mark.parametrize("ways", WAYS, ids=repr)
def test_times_and_noise_are_functions_of_the_sample_and_not_of_its_neighbours(ways: TrainingTimes) -> None:
    algorithm, track = Matching(times=ways), clean_track()
    whole = all_noised(algorithm, track)
    order = [5, 0, 7, 2]
    some = all_noised(algorithm, track.select(order))
    assert torch.equal(some.t, whole.t[order]) and torch.equal(some.eps, whole.eps[order])
    for part in algorithm.parts(track.segment):  # entry by entry, as micro-batches of one row see them
        one = algorithm.noised(track.slice(3, 4), part)
        assert torch.equal(one.t[0], whole.t[3, list(part)]) and torch.equal(one.eps[0], whole.eps[3, list(part)])


def test_every_step_of_the_loop_every_sample_and_every_time_has_its_own_noise() -> None:
    algorithm = Matching()
    draws = [all_noised(algorithm, clean_track(step=step)).eps.flatten(0, 1) for step in (0, 1)]
    assert len({row.numpy().tobytes() for row in torch.cat(draws)}) == 2 * 8 * 4


def test_noise_is_standard_normal_and_independent_of_the_time() -> None:
    noised = all_noised(Matching(times=UniformTimes(num_times=2)), clean_track(prompts=400, siblings=2))
    eps = noised.eps.flatten(2).double()
    assert abs(float(eps.mean())) < 0.01 and abs(float(eps.std()) - 1) < 0.01
    for j in range(2):
        for element in range(4):
            together = torch.stack([noised.t[:, j].double(), eps[:, j, element]])
            assert abs(float(torch.corrcoef(together)[0, 1])) < 4 / math.sqrt(800)


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
def test_points_lie_on_the_straight_path_and_the_target_is_its_slope(shape: tuple[int, ...]) -> None:
    track = clean_track(shape)
    noised = all_noised(Matching(times=UniformTimes(num_times=3)), track)
    x0 = track.segment.final
    for b in range(len(track)):
        for j in range(3):
            t = float(noised.t[b, j])
            assert torch.allclose(noised.x[b, j], (1 - t) * x0[b] + t * noised.eps[b, j], atol=1e-6)
            assert torch.allclose(noised.x[b, j] - t * noised.target[b, j], x0[b], atol=1e-6)
            assert torch.allclose(noised.x[b, j] + (1 - t) * noised.target[b, j], noised.eps[b, j], atol=1e-6)


def test_parts_follow_from_the_recipe_and_the_length_of_the_schedule_alone() -> None:
    track = clean_track()
    assert Matching().parts(track.segment) == [(0,), (1,), (2,), (3,)]
    assert Matching(times_per_forward=3).parts(track.segment) == [(0, 1, 2), (3,)]
    assert Matching(times=UniformTimes(num_times=2), times_per_forward=5).parts(track.segment) == [(0, 1)]
    assert Matching().parts(track.slice(6, 7).segment) == Matching().parts(track.segment)


# The velocity


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
@pytest.mark.parametrize("times_per_forward", [1, 3, 4])
def test_the_gradient_is_that_of_weighted_flow_matching(shape: tuple[int, ...], times_per_forward: int) -> None:
    stage, track = field_stage(), clean_track(shape)
    algorithm = Matching(times_per_forward=times_per_forward)
    noised, weights = all_noised(algorithm, track), weights64(stage)
    error = (velocity64(weights, track, noised) - (noised.eps.double() - noised.x0.double())).square()
    expected = (track.advantages.double()[:, None] * error.flatten(2).mean(2)).sum()
    assert_close(gradient(algorithm, stage, track), torch.autograd.grad(expected, weights)[0])


@pytest.mark.parametrize("guidance_passes", [1, 2])
def test_the_velocity_is_trained_without_guidance_unless_the_recipe_says_so(guidance_passes: int) -> None:
    stage = toy_stage()
    track = toy_track(stage, params=toy_params(guidance_scale=3.0, guidance_passes=guidance_passes))
    text, empty = (track.conditions[name] for name in ("text", "negative_text"))
    for guided in (False, True):
        algorithm = Matching(train_guided=guided)
        noised = algorithm.noised(track, (1,))
        x, t = noised.x[:, 0], noised.t[:, 0]
        cond, uncond = (stage.velocity(x, t, {"text": c}, Guidance()) for c in (text, empty))
        expected = uncond + 3.0 * (cond - uncond) if guided else cond
        assert torch.allclose(algorithm.velocity(stage, track, noised)[:, 0], expected, atol=1e-6)
        assert not torch.allclose(cond, uncond, atol=1e-3)


def test_values_in_a_dropped_row_reach_no_gradient() -> None:
    stage, track = field_stage(), clean_track()
    latents, advantages = track.segment.latents.clone(), track.advantages.clone()
    latents[2], advantages[2] = float("nan"), float("inf")
    weight = torch.ones(8)
    weight[2] = 0.0
    broken = track.replace(segment=track.segment.replace(latents=latents), advantages=advantages, weight=weight)
    result = gradient(Matching(), stage, broken)
    assert result.isfinite().all()
    assert_close(result, gradient(Matching(), stage, track.select([0, 1, 3, 4, 5, 6, 7])).double())


# What recipes may say


def test_guidance_of_a_second_expert_alone_is_named() -> None:
    with pytest.raises(ConfigError, match=r"guidance_scale_2=3 is CFG at rollout .* Set sampling.guidance_scale_2=1"):
        Matching().check_sampling(toy_params(guidance_scale_2=3.0))


def test_guidance_at_rollout_alone_is_refused_before_anything_starts() -> None:
    guided = toy_params(guidance_scale=4.5)
    with pytest.raises(ConfigError, match=r"guidance_scale=4.5 is CFG at rollout and not at training.*train_guided"):
        Matching().check_sampling(guided)
    Matching(train_guided=True).check_sampling(guided)
    Matching().check_sampling(toy_params())


def test_a_schedule_without_a_level_to_train_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="nothing to draw from"):
        Matching(times=ScheduleTimes(fraction=0.3, skip_first=True)).check_sampling(toy_params())


def test_it_needs_neither_densities_nor_log_probs() -> None:
    needs = Matching().needs
    assert not needs.density and not needs.behaviour_logp and needs.snapshots == () and needs.multi_update
    with pytest.raises(ConfigError, match="times_per_forward must be >= 1, got 0"):
        Matching(times_per_forward=0)


@pytest.mark.parametrize("ways", WAYS, ids=repr)
def test_it_keeps_the_contract_of_losses(ways: TrainingTimes) -> None:
    check_algorithm(Matching(times=ways, times_per_forward=2), field_stage(), clean_track())
