"""Reward-weighted regression: what a sample weighs, and fine-tuning on the best of each group as a case of it."""

import pytest
import torch
from torch import Tensor

from tests.algorithms.clean_samples import (
    SHAPES,
    all_noised,
    anchored,
    assert_close,
    clean_track,
    field_stage,
    gradient,
    latent_mean,
    velocity64,
    weights64,
)
from unirl.algorithms.diffusion_rwr import DiffusionRWR
from unirl.algorithms.shared.advantages import BestOfGroup
from unirl.algorithms.shared.training_times import UniformTimes
from unirl.config.errors import ConfigError, RewardError
from unirl.testing.algorithm import check_algorithm
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack, Scores

TIMES = UniformTimes(num_times=3, low=0.1)


def expected_gradient(algorithm: DiffusionRWR, track: RolloutTrack, worth: Tensor) -> Tensor:
    """Gradient of the sum of weights [B] times e(v), in float64."""
    noised, weights = all_noised(algorithm, track), weights64(field_stage())
    error = latent_mean((velocity64(weights, track, noised) - (noised.eps.double() - noised.x0.double())) ** 2)
    return torch.autograd.grad((worth.double()[:, None] * error).sum(), weights)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
def test_sample_weights_are_bounded_exponentials_of_the_advantage(shape: tuple[int, ...]) -> None:
    track = clean_track(shape)
    algorithm = DiffusionRWR(temperature=0.4, max_weight=3.0, times=TIMES, times_per_forward=2)
    worth = (track.advantages.double() / 0.4).exp().clamp(max=3.0)
    assert 0 < int((worth == 3.0).sum()) < 8
    assert_close(gradient(algorithm, field_stage(), track), expected_gradient(algorithm, track, worth))


def test_sample_weights_can_be_rewards_or_advantages() -> None:
    rewards, advantages = torch.rand(2, 8, generator=torch.Generator().manual_seed(2))
    track = clean_track().replace(rewards=rewards, advantages=advantages)
    for weighting, worth in (("reward", rewards), ("advantage", advantages)):
        algorithm = DiffusionRWR(weighting=weighting, times=TIMES)  # type: ignore[arg-type]
        assert_close(gradient(algorithm, field_stage(), track), expected_gradient(algorithm, track, worth))


@pytest.mark.parametrize("weighting", ["reward", "advantage"])
def test_regression_away_from_a_sample_is_refused_and_says_which(weighting: str) -> None:
    track = clean_track()  # rewards and advantages of both signs
    first = int((track.advantages < 0).nonzero()[0])
    algorithm = DiffusionRWR(weighting=weighting, times=TIMES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{weighting}, and that of '{track.sample_ids[first]}' is -.*DiffusionAWM"):
        algorithm.count(track)
    alive = track.replace(weight=(track.advantages > 0).float())
    assert algorithm.count(alive) == 3 * int((track.advantages > 0).sum())


def test_the_velocity_penalty_is_the_mean_squared_distance_to_the_reference() -> None:
    algorithm = DiffusionRWR(velocity_coef=0.5, times=TIMES)
    live, reference = field_stage(0), field_stage(1)
    track = anchored(algorithm, clean_track(), reference=reference)
    noised = algorithm.noised(track, (2,))
    v, v_ref = (velocity64(weights64(stage).detach(), track, noised) for stage in (live, reference))
    worth = track.advantages.double().exp()[:, None]
    target = noised.target.double()
    expected = (worth * latent_mean((v - target) ** 2) + 0.5 * latent_mean((v - v_ref) ** 2)).sum()
    result = algorithm.loss(live, track, (2,))
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    actual = values(result.metrics)
    assert actual["train/sample_weight"] == pytest.approx(float(worth.mean()), rel=1e-5)
    assert actual["train/matching_error"] == pytest.approx(float(latent_mean((v - target) ** 2).mean()), rel=1e-5)
    assert actual["train/velocity_mse"] == pytest.approx(float(latent_mean((v - v_ref) ** 2).mean()), rel=1e-5)


def test_with_best_of_group_it_is_fine_tuning_on_the_best_samples() -> None:
    rewards = torch.tensor([0.1, 0.9, 0.9, 0.2, 0.5, 0.3, -1.0, 0.4])
    track = clean_track().replace(rewards=rewards)
    credited, metrics = track.compute_advantages(BestOfGroup())
    assert credited.advantages.tolist() == credited.weight.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    assert values(metrics)["rollout/zero_std_group_ratio"] == 0.0
    algorithm = DiffusionRWR(weighting="advantage", times=TIMES)
    assert algorithm.count(credited) == 2 * 3
    best = track.select([1, 4])
    expected = expected_gradient(algorithm, best, torch.ones(2))
    assert_close(gradient(algorithm, field_stage(), credited), expected)


def test_a_group_of_equal_rewards_and_a_dropped_row_have_no_best_sample() -> None:
    def best(rewards: list[float], weight: list[float]) -> list[float]:
        scores = Scores(total=torch.tensor(rewards), group_ids=["a"] * len(rewards), weight=torch.tensor(weight))
        return BestOfGroup()(scores).weight.tolist()

    assert best([0.3, 0.3, 0.3], [1, 1, 1]) == [0, 0, 0]
    assert best([0.3, 0.9, 0.1], [2, 0, 2]) == [2, 0, 0]
    assert best([0.3, 0.9, float("nan")], [1, 1, 0]) == [0, 1, 0]
    with pytest.raises(RewardError, match="nan"):
        best([0.3, 0.9, float("nan")], [1, 1, 1])


def test_needs_are_samples_only() -> None:
    needs = DiffusionRWR().needs
    assert needs.snapshots == () and not needs.density and not needs.ema_rollout and needs.multi_update
    assert DiffusionRWR(velocity_coef=0.1).needs.snapshots == ("reference",)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"max_weight": -1.0}, {"velocity_coef": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))) as error:
        DiffusionRWR(**options)  # type: ignore[arg-type]
    assert error.value.code == 2004


@pytest.mark.parametrize("options", [{}, {"velocity_coef": 0.3}])
def test_it_keeps_the_contract_of_losses(options: dict[str, float]) -> None:
    check_algorithm(DiffusionRWR(**options), field_stage(), clean_track())  # type: ignore[arg-type]
