"""Diffusion-DPO: the paper's loss on pairs of a data set and of a rollout, its symmetry, and how pairs are made."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.clean_samples import (
    SHAPES,
    all_noised,
    anchored,
    assert_close,
    clean_track,
    field_stage,
    gradient,
    latent_mean,
    offline_track,
    velocity64,
    weights64,
)
from unirl.algorithms.diffusion_dpo import DiffusionDPO, preference_margin
from unirl.algorithms.shared.groups import best_and_worst, in_pairs
from unirl.algorithms.shared.training_times import LogitNormalTimes, UniformTimes
from unirl.config.errors import ConfigError
from unirl.testing.algorithm import check_algorithm
from unirl.types.protocols import Anchor
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

TIMES = UniformTimes(num_times=3, low=0.1)


def some_pairs(shape: tuple[int, ...] = SHAPES[0], prompts: int = 3) -> RolloutTrack:
    winners, losers = torch.randn(2, prompts, *shape, generator=torch.Generator().manual_seed(5))
    return offline_track(winners, losers, [f"prompt {i}" for i in range(prompts)])


# The loss


@pytest.mark.parametrize("shape", SHAPES, ids=["image", "video"])
def test_loss_and_gradient_are_the_papers_on_pairs_of_a_data_set(shape: tuple[int, ...]) -> None:
    algorithm = DiffusionDPO(beta=3.0, times=TIMES, times_per_forward=2)
    live, reference = field_stage(0), field_stage(1)
    track = anchored(algorithm, some_pairs(shape), reference=reference)
    noised, weights = all_noised(algorithm, track), weights64(live)
    target = noised.eps.double() - noised.x0.double()
    error, error_ref = (
        latent_mean((velocity64(w, track, noised) - target) ** 2) for w in (weights, weights64(reference).detach())
    )
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(3):  # winner 2 i, loser 2 i + 1
        gap = (error[2 * i] - error[2 * i + 1]) - (error_ref[2 * i] - error_ref[2 * i + 1])
        expected = expected - torch.log(torch.sigmoid(-0.5 * 3.0 * gap)).sum()
    actual = sum(algorithm.loss(live, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert actual == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradient(algorithm, live, track), torch.autograd.grad(expected, weights)[0])
    assert algorithm.count(track) == 3 * 3  # pairs times times


def test_before_the_first_update_the_loss_is_log_two_and_the_errors_have_slope_a_quarter_of_beta() -> None:
    algorithm, stage = DiffusionDPO(beta=7.0, times=TIMES), field_stage()
    track = anchored(algorithm, some_pairs(), reference=stage)
    actual = sum(algorithm.loss(stage, track, part).loss.item() for part in algorithm.parts(track.segment))
    assert actual / algorithm.count(track) == pytest.approx(math.log(2), rel=1e-9)
    error = torch.rand(6, 3, dtype=torch.float64, requires_grad=True)
    margin = preference_margin(-error, -error.detach(), beta=7.0)
    (slope,) = torch.autograd.grad(torch.nn.functional.softplus(-margin).sum(), error)
    assert torch.allclose(slope[0::2], torch.full((3, 3), 7.0 / 4, dtype=torch.float64))
    assert torch.allclose(slope[1::2], torch.full((3, 3), -7.0 / 4, dtype=torch.float64))


def test_swapping_winner_and_loser_negates_the_margin_and_the_first_gradient() -> None:
    logp, ref = torch.randn(2, 6, 3, dtype=torch.float64)
    swap = [1, 0, 3, 2, 5, 4]
    assert torch.equal(preference_margin(logp[swap], ref[swap], 2.0), -preference_margin(logp, ref, 2.0))
    # Through the whole loss: the noise of a pair must not move with the winner's name.
    algorithm, stage, track = DiffusionDPO(beta=2.0, times=TIMES), field_stage(), some_pairs()
    swapped = track.replace(segment=track.segment.replace(latents=track.segment.latents[swap]))
    slopes = [gradient(algorithm, stage, anchored(algorithm, rows, reference=stage)) for rows in (track, swapped)]
    assert_close(slopes[0], -slopes[1].double())


@pytest.mark.parametrize("times", [TIMES, LogitNormalTimes(num_times=3)], ids=["uniform", "logit-normal"])
def test_both_of_a_pair_have_the_same_times_and_noise_and_pairs_their_own(times: UniformTimes) -> None:
    noised = all_noised(DiffusionDPO(times=times), some_pairs())
    assert torch.equal(noised.t[0::2], noised.t[1::2]) and torch.equal(noised.eps[0::2], noised.eps[1::2])
    assert not torch.equal(noised.t[0], noised.t[2]) and not torch.equal(noised.eps[0], noised.eps[2])


def test_a_pair_with_a_row_of_weight_zero_has_no_effect() -> None:
    algorithm, live, reference = DiffusionDPO(times=TIMES), field_stage(0), field_stage(1)
    track = some_pairs()
    for dropped in (2, 3):
        weight, latents = torch.ones(6), track.segment.latents.clone()
        weight[dropped], latents[dropped] = 0.0, float("nan")
        rows = track.replace(weight=weight, segment=track.segment.replace(latents=latents))
        rows = anchored(algorithm, rows, reference=reference)
        others = anchored(algorithm, track.select([0, 1, 4, 5]), reference=reference)
        assert algorithm.count(rows) == algorithm.count(others) == 2 * 3
        assert_close(gradient(algorithm, live, rows), gradient(algorithm, live, others).double())


def test_metrics_are_those_of_the_implicit_preference() -> None:
    algorithm, live, reference = DiffusionDPO(beta=3.0, times=TIMES), field_stage(0), field_stage(1)
    track = anchored(algorithm, some_pairs(), reference=reference)
    result = algorithm.loss(live, track, (1,))
    margin = preference_margin(result.outputs["logp"], algorithm.filled_anchor(track, "ref_logp", (1,)), 3.0)
    actual = values(result.metrics)
    assert actual["train/preference_accuracy"] == pytest.approx(float((margin > 0).double().mean()))
    assert actual["train/preference_margin"] == pytest.approx(float(margin.mean()))
    assert actual["train/matching_error"] == pytest.approx(-float(result.outputs["logp"].mean()))


def test_rows_that_are_not_pairs_are_refused() -> None:
    algorithm, stage, track = DiffusionDPO(times=TIMES), field_stage(), clean_track(siblings=3)
    with pytest.raises(ValueError, match=r"rows 2 and 3 are of two prompts.*in_pairs"):
        algorithm.loss(stage, track, (0,))
    with pytest.raises(ValueError, match="one row is left over"):
        algorithm.loss(stage, track.slice(0, 1), (0,))


def test_needs_are_adjacent_pairs_and_a_reference_policy() -> None:
    needs = DiffusionDPO(pairs_per_group=2).needs
    assert (needs.rows_together, needs.pairs, needs.snapshots) == (2, 2, ("reference",))
    assert not needs.density and not needs.ema_rollout
    assert DiffusionDPO(reference="ema").anchors() == {"ref_logp": Anchor("ema", "logp")}


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"pairs_per_group": 0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))) as error:
        DiffusionDPO(**options)  # type: ignore[arg-type]
    assert error.value.code == 2004


def test_it_keeps_the_contract_of_losses() -> None:
    check_algorithm(DiffusionDPO(beta=2.0), field_stage(), clean_track())


# Pairs


def test_the_best_is_paired_with_the_worst_and_the_second_best_with_the_second_worst() -> None:
    advantages = torch.tensor([0.1, 2.0, -1.0, 0.5, 0.0, -0.3, -2.0, 1.0])
    groups = ["a", "b", "a", "b", "a", "b", "b", "a"]
    one = best_and_worst(advantages, groups, torch.ones(8), 1)
    assert one == ([7, 2, 1, 6], [True, True])
    two = best_and_worst(advantages, groups, torch.ones(8), 2)
    assert two == ([7, 2, 0, 4, 1, 6, 3, 5], [True] * 4)


def test_dropped_rows_are_taken_last_and_pairs_with_them_are_not_trained() -> None:
    advantages, weight = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert best_and_worst(advantages, ["a"] * 4, weight, 1)[0] == [0, 2]
    rows, is_informative = best_and_worst(advantages, ["a"] * 4, weight, 2)
    assert sorted(rows) == [0, 1, 2, 3] and rows[:2] == [0, 2] and is_informative == [True, False]
    rows, is_informative = best_and_worst(advantages, ["a"] * 4, torch.tensor([0.0, 1.0, 0.0, 0.0]), 1)
    assert 1 in rows and is_informative == [False]


def test_an_uninformative_pair_keeps_its_place_with_weight_zero() -> None:
    track = clean_track().replace(advantages=torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    paired = in_pairs(track, 1)
    assert paired.sample_ids[:2] == ["p0@0:0", "p0@0:2"] and len(paired) == 4
    assert paired.weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert DiffusionDPO(times=TIMES).count(paired) == 3


def test_pairing_carries_whole_rows() -> None:
    track = clean_track()
    paired = in_pairs(track, 2)
    where = [track.sample_ids.index(sample) for sample in paired.sample_ids]
    assert torch.equal(paired.segment.latents, track.segment.latents[where])
    assert torch.equal(paired.advantages, track.advantages[where])
    assert sorted(where) == list(range(8))
    assert (paired.advantages[0::2] >= paired.advantages[1::2]).all()


def test_a_group_has_no_more_pairs_than_half_its_samples() -> None:
    track = clean_track(siblings=5)
    assert in_pairs(track, 99).sample_ids == in_pairs(track, 2).sample_ids
    assert len(in_pairs(track, 99)) == 2 * 4


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=4, max_size=9),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_paired_rows_are_the_extremes_of_their_group(rows: list[tuple[int, bool]], num_pairs: int, random) -> None:
    """Brute force over any rewards, ties and dropped rows, in any order."""
    random.shuffle(rows)
    advantages = torch.tensor([float(value) for value, _ in rows])
    weight = torch.tensor([float(alive) for _, alive in rows])
    actual, is_informative = best_and_worst(advantages, ["a"] * len(rows), weight, num_pairs)
    assert len(actual) == len(set(actual)) == 2 * num_pairs and len(is_informative) == num_pairs
    alive = [i for i in range(len(rows)) if weight[i] > 0]
    by_value = sorted(float(advantages[i]) for i in alive)
    pairs = list(zip(actual[0::2], actual[1::2], strict=True))
    for number, ((winner, loser), trained) in enumerate(zip(pairs, is_informative, strict=True)):
        if winner in alive and loser in alive:
            assert advantages[winner] == by_value[-1 - number] and advantages[loser] == by_value[number]
            assert trained == (advantages[winner] > advantages[loser])
        else:
            assert not trained and len(alive) < 2 * num_pairs
