"""GRPO on tokens and its recipes: clip quadrants, the dual clip, the reference, and exact expectations on a table."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import LeafStage, Sequence, assert_same_gradient, looped, ragged, value
from tests.tokens import PromptNumber, TableStage, token_stage
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.shared.kl import k1, k2, k3
from unirl.types.protocols import TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import TextSegment


def one_token(advantage: float, ratio: float) -> tuple[LeafStage, RolloutTrack]:
    stage, track = ragged(0, (1,))
    segment = track.segment.replace(
        loss_mask=torch.ones(1, dtype=torch.bool),
        anchors={"old_logp": stage.logp.detach() - math.log(ratio)},
    )
    return stage, track.replace(segment=segment, advantages=torch.tensor([advantage], dtype=torch.float64))


def loss_and_slope(algorithm: ARGRPO, advantage: float, ratio: float) -> tuple[float, float]:
    stage, track = one_token(advantage, ratio)
    loss = value(algorithm, stage, track)
    return loss.item(), stage.gradients(loss)[0].item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"),
    [
        (2.0, 1.27, -2.54),
        (2.0, 1.29, 0.0),
        (2.0, 0.5, -1.0),
        (-2.0, 0.81, 1.62),
        (-2.0, 0.79, 0.0),
        (-2.0, 1.5, 3.0),
    ],
)
def test_clip_higher_clips_only_ratios_beyond_the_bound_of_their_direction(
    advantage: float, ratio: float, slope: float
) -> None:
    result = loss_and_slope(ARGRPO(clip_range=0.2, clip_range_high=0.28), advantage, ratio)
    assert result[1] == pytest.approx(slope, rel=1e-12, abs=1e-15)


def test_a_dual_clip_of_three_bounds_a_loss_of_five() -> None:
    assert loss_and_slope(ARGRPO(), -1.0, 5.0) == pytest.approx((5.0, 5.0), rel=1e-12)
    assert loss_and_slope(ARGRPO(dual_clip=3.0), -1.0, 5.0) == (3.0, 0.0)
    assert loss_and_slope(ARGRPO(dual_clip=3.0), -1.0, 2.0) == pytest.approx((2.0, 2.0), rel=1e-12)
    assert loss_and_slope(ARGRPO(dual_clip=3.0, clip_range_high=9.0), 1.0, 5.0)[1] == pytest.approx(-5.0, rel=1e-12)


def test_the_clip_range_follows_its_schedule() -> None:
    algorithm = ARGRPO(clip_range=0.2, clip_range_high=0.3, clip_schedule="linear")
    assert algorithm.clip_at(1.0) == pytest.approx((0.1, 0.15))
    stage, track = one_token(1.0, 1.2)
    early, late = (
        algorithm.loss(stage, track, (0,), TrainingProgress(progress=p)).metrics["train/clip_fraction"]
        for p in (0.0, 1.0)
    )
    assert (early.value, late.value) == (0.0, 1.0)


def test_clip_fractions_and_extremes_use_counted_tokens_only() -> None:
    stage, track = ragged(5)
    result = values(ARGRPO(clip_range=0.2, clip_range_high=0.4).loss(stage, track, (0,)).metrics)
    live = track.segment.loss_mask & (track.weight > 0).repeat_interleave(track.segment.lengths)
    ratio = (stage.logp.detach() - track.segment.anchors["old_logp"])[live].exp()
    weight = (
        track.weight.repeat_interleave(track.segment.lengths)[live]
        / track.weight.repeat_interleave(track.segment.lengths)[live].sum()
    )
    assert result["train/ratio_mean"] == pytest.approx(float((weight * ratio).sum()), rel=1e-6)
    assert result["train/clip_fraction_high"] == pytest.approx(float((weight * (ratio > 1.4)).sum()), rel=1e-6)
    assert result["train/clip_fraction_low"] == pytest.approx(float((weight * (ratio < 0.8)).sum()), rel=1e-6)
    assert result["train/ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-12)
    assert result["train/ratio_min"] == pytest.approx(float(ratio.min()), rel=1e-12)
    assert result["train/clip_range"] == 0.2


# The reference and the entropy


@pytest.mark.parametrize(
    ("estimator", "term"),
    [("k2", k2), ("k3", k3), ("k3+", lambda d: k3(d).detach() + k2(d) - k2(d).detach())],
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_kl_in_the_loss_uses_the_aggregation_of_the_loss(estimator: Any, term: Any, mode: Any) -> None:
    stage, track = ragged(4)
    algorithm = ARGRPO(loss_agg_mode=mode, kl_coef=0.3, kl_estimator=estimator)

    def per_token(row: Sequence) -> Tensor:
        gain = torch.minimum(row.ratio * row.advantage, row.ratio.clamp(0.8, 1.2) * row.advantage)
        return -gain + 2.0 * 0.3 * term(row.new - row.ref)

    result = value(algorithm, stage, track, TrainingProgress(kl_scale=2.0))
    assert_same_gradient(stage, result, looped(stage, track, per_token, mode))
    metrics = values(algorithm.loss(stage, track, (0,), TrainingProgress(kl_scale=2.0)).metrics)
    parts = metrics["train/policy_loss"] + metrics["train/kl_loss"]
    assert parts == pytest.approx(result.item(), rel=1e-12)
    assert metrics["train/kl_coef"] == 0.6


def test_a_kl_in_the_reward_lowers_the_advantage_of_its_own_and_earlier_tokens() -> None:
    stage, track = ragged(4)
    algorithm = ARGRPO(kl_coef=0.3, kl_in="reward", kl_estimator="k1")

    def per_token(row: Sequence) -> Tensor:
        kl_penalty = 2.0 * 0.3 * (row.old - row.ref)
        advantage = torch.stack([row.advantage - kl_penalty[t:].sum() for t in range(len(kl_penalty))])
        return -torch.minimum(row.ratio * advantage, row.ratio.clamp(0.8, 1.2) * advantage)

    result = value(algorithm, stage, track, TrainingProgress(kl_scale=2.0))
    assert_same_gradient(stage, result, looped(stage, track, per_token, "token-mean"))


def test_an_entropy_bonus_is_subtracted_from_the_loss_and_logged() -> None:
    stage, track = ragged(4)
    algorithm = ARGRPO(entropy_coef=0.2)

    def per_token(row: Sequence) -> Tensor:
        gain = torch.minimum(row.ratio * row.advantage, row.ratio.clamp(0.8, 1.2) * row.advantage)
        return -gain - 0.2 * row.entropy

    assert_same_gradient(stage, value(algorithm, stage, track), looped(stage, track, per_token, "token-mean"))
    entropy = values(algorithm.loss(stage, track, (0,)).metrics)["train/entropy"]
    assert entropy == pytest.approx(looped(stage, track, lambda row: row.entropy, "token-mean").item(), rel=1e-12)
    estimate = values(ARGRPO().loss(stage, track, (0,)).metrics)["train/entropy"]
    assert estimate == pytest.approx(looped(stage, track, lambda row: -row.new, "token-mean").item(), rel=1e-12)


# Exact expectations: every response of a small table, weighted by its probability


def everything(stage: TableStage, length: int) -> RolloutTrack:
    """All V^length responses to prompt 0; the weight of a row is its probability."""
    size = stage.table.vocabulary
    grid = torch.tensor(list(itertools.product(range(size), repeat=length)))
    count = len(grid)
    segment = TextSegment(
        tokens=grid.flatten(),
        logp=torch.zeros(grid.numel(), dtype=torch.float64),
        loss_mask=torch.ones(grid.numel(), dtype=torch.bool),
        offsets=torch.arange(count + 1) * length,
        finished=torch.zeros(count, dtype=torch.bool),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={},
    )
    conditions = {"prompt": PromptNumber(number=torch.zeros(count, dtype=torch.int64))}
    logp = stage.replay(conditions, segment).logp.detach()
    return RolloutTrack(
        sample_ids=[str(i) for i in range(count)],
        group_ids=["p"] * count,
        conditions=conditions,
        segment=segment.replace(logp=logp),
        advantages=torch.zeros(count, dtype=torch.float64),
        weight=logp.view(count, length).sum(1).exp(),
        weight_version=torch.zeros(count, dtype=torch.int64),
    )


def double_stage(seed: int, vocabulary: int = 3) -> TableStage:
    stage = token_stage(seed, vocabulary=vocabulary, prompts=1)
    stage.table.double()
    return stage


def response_logp(stage: TableStage, track: RolloutTrack) -> Tensor:
    return stage.replay(track.conditions, track.segment).logp.view(len(track), -1).sum(1)


def table_gradient(stage: TableStage, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, stage.table.table)[0]


@pytest.mark.parametrize("length", [1, 3])
def test_a_baseline_does_not_change_the_expected_gradient(length: int) -> None:
    stage = double_stage(0)
    track = everything(stage, length)
    assert float(track.weight.sum()) == pytest.approx(1.0, rel=1e-12)
    reward = torch.randn(len(track), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    greedy = int(track.weight.argmax())  # ReMax: the reward of one fixed response
    algorithm = ARGRPO(loss_agg_mode="seq-mean-token-sum")
    want = table_gradient(stage, -(response_logp(stage, track).exp() * reward).sum())
    for baseline in (0.0, float(reward[greedy]), 7.0):
        result = table_gradient(stage, value(algorithm, stage, track.replace(advantages=reward - baseline)))
        assert torch.allclose(result, want, rtol=0, atol=1e-12)


def test_a_kl_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses() -> None:
    stage, reference = double_stage(0), double_stage(1)
    track = everything(stage, 3)
    ref_logp = reference.replay(track.conditions, track.segment).logp.detach()
    track = track.replace(segment=track.segment.replace(anchors={"ref_logp": ref_logp}))
    algorithm = ARGRPO(loss_agg_mode="seq-mean-token-sum", kl_coef=0.7, kl_in="reward", kl_estimator="k1")
    result = table_gradient(stage, value(algorithm, stage, track))
    logp = response_logp(stage, track)
    kl = (logp.exp() * (logp - response_logp(reference, track).detach())).sum()
    assert torch.allclose(result, table_gradient(stage, 0.7 * kl), rtol=0, atol=1e-12)
    per_token = values(algorithm.loss(stage, track, (0,)).metrics)["train/kl"]
    assert per_token * 3 == pytest.approx(kl.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected", "reverse"), [("k2", 0.0248624, True), ("k3", 0.0252672, False), ("k3+", 0.0252672, True)]
)
def test_kl_estimators_in_the_loss_on_a_categorical_of_three(estimator: Any, expected: float, reverse: bool) -> None:
    p, q = (torch.tensor(values_, dtype=torch.float64) for values_ in ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2)))
    stage = double_stage(0)
    with torch.no_grad():
        stage.table.table[:] = p.log()
    track = everything(stage, 1)
    track = track.replace(segment=track.segment.replace(anchors={"ref_logp": q.log()}))
    result = value(ARGRPO(kl_coef=1.0, kl_estimator=estimator), stage, track)
    assert result.item() == pytest.approx(expected, abs=5e-8)
    logp = stage.replay(track.conditions, track.segment).logp
    kl = (logp.exp() * (logp - q.log())).sum() if reverse else (q * (q.log() - logp)).sum()
    assert torch.allclose(table_gradient(stage, result), table_gradient(stage, kl), rtol=0, atol=1e-12)
    assert float((p * k1(p.log() - q.log())).sum()) == pytest.approx(0.0252672, abs=5e-8)


def test_the_exact_entropy_has_its_own_gradient_and_the_estimate_its_mean() -> None:
    stage = double_stage(2)
    track = everything(stage, 1)
    logp = stage.replay(track.conditions, track.segment).logp
    entropy = -(logp.exp() * logp).sum()
    result = value(ARGRPO(entropy_coef=1.0), stage, track)
    assert result.item() == pytest.approx(-entropy.item(), rel=1e-12)
    assert torch.allclose(table_gradient(stage, result), table_gradient(stage, -entropy), rtol=0, atol=1e-12)
    estimate = values(ARGRPO().loss(stage, track, (0,)).metrics)["train/entropy"]
    assert estimate == pytest.approx(entropy.item(), rel=1e-12)
