"""GSPO and GMPO: one weight per sequence."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import LeafStage, assert_same_gradient, ragged, value
from unirl.algorithms.ar_grpo import ARGRPO, GSPO
from unirl.algorithms.ar_trust_regions import GMPO
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

WIDE = 0.999


def test_gspo_of_single_tokens_is_grpo() -> None:
    stage, track = ragged(0, (1,) * 9)
    clips = {"clip_range": 0.2, "clip_range_high": 0.3}
    gspo, grpo = GSPO(**clips), ARGRPO(loss_agg_mode="seq-mean-token-mean", **clips)
    assert_same_gradient(stage, value(gspo, stage, track), value(grpo, stage, track))


@pytest.mark.parametrize("log_ratio", [-0.4, -0.05, 0.05, 0.4])
def test_gspo_of_tokens_with_equal_ratios_is_grpo_at_that_ratio(log_ratio: float) -> None:
    stage, track = ragged(0)
    old = stage.logp.detach() - log_ratio
    track = track.replace(segment=track.segment.replace(anchors={"old_logp": old}))
    clips = {"clip_range": 0.2, "clip_range_high": 0.3}
    gspo, grpo = GSPO(**clips), ARGRPO(loss_agg_mode="seq-mean-token-mean", **clips)
    assert_same_gradient(stage, value(gspo, stage, track), value(grpo, stage, track))


def test_the_gradient_of_a_sequence_is_shared_evenly_by_its_tokens() -> None:
    stage, track = three_tokens(-2.0, [0.3, -0.1, 0.1])
    loss = value(GSPO(clip_range=WIDE, clip_range_high=1e9), stage, track)
    s = math.exp(0.1)
    assert loss.item() == pytest.approx(2 * s, rel=1e-12)
    assert stage.gradients(loss)[0].tolist() == pytest.approx([2 * s / 3] * 3, rel=1e-12)


def test_gspo_clips_whole_sequences_and_counts_their_tokens_as_clipped() -> None:
    stage, track = ragged(0, (3, 3))
    track = track.replace(
        weight=torch.ones(2, dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0], dtype=torch.float64),
        segment=track.segment.replace(
            loss_mask=torch.ones(6, dtype=torch.bool),
            # one token of row 0 has gone far, and so has the mean; row 1's move cancels
            anchors={"old_logp": stage.logp.detach() - torch.tensor([0.9, 0.0, 0.0, 0.9, -0.9, 0.0])},
        ),
    )
    result = GSPO(clip_range=0.2, clip_range_high=0.2).loss(stage, track, (0,))
    gradient = stage.gradients(result.loss)[0]
    assert not gradient[:3].any() and bool((gradient[3:] != 0).all())
    assert values(result.metrics)["train/clip_fraction_high"] == 0.5


def test_gmpo_without_its_clip_is_gspo_without_its_clip() -> None:
    stage, track = ragged(2)
    gmpo, gspo = GMPO(clip_range=1e9), GSPO(clip_range=1 - 1e-12, clip_range_high=1e12)
    assert_same_gradient(stage, value(gmpo, stage, track), value(gspo, stage, track))


@pytest.mark.parametrize(("advantage", "bounded"), [(1.0, [0.4, -0.9, 0.1]), (-1.0, [0.9, -0.4, 0.1])])
def test_gmpo_clips_a_token_in_the_direction_of_its_update(advantage: float, bounded: list[float]) -> None:
    stage, track = three_tokens(advantage, [0.9, -0.9, 0.1])
    algorithm = GMPO(clip_range=0.4)
    loss = value(algorithm, stage, track)
    weight = float(torch.tensor(bounded, dtype=torch.float64).mean().exp())
    assert loss.item() == pytest.approx(-advantage * weight, rel=1e-12)
    free = [limit == move for limit, move in zip(bounded, [0.9, -0.9, 0.1], strict=True)]
    want = [-advantage * weight / 3 if moves else 0.0 for moves in free]
    assert stage.gradients(loss)[0].tolist() == pytest.approx(want, rel=1e-12)
    actual = values(algorithm.loss(stage, track, (0,)).metrics)
    side = "high" if advantage > 0 else "low"
    assert actual[f"train/clip_fraction_{side}"] == actual["train/clip_fraction"] == pytest.approx(1 / 3)


def test_a_token_without_advantage_has_no_gradient_in_gmpo() -> None:
    stage, track = three_tokens(0.0, [0.9, -0.9, 0.1])
    assert not stage.gradients(value(GMPO(), stage, track))[0].any()


@pytest.mark.parametrize("algorithm", [GSPO(), GMPO()])
def test_the_sequence_ratio_does_not_grow_with_length(algorithm: TokenLoss) -> None:
    """A response ten times as long moves the policy as much."""
    short, long = three_tokens(1.0, [0.0] * 3), three_tokens(1.0, [0.0] * 30)
    sizes = [float(stage.gradients(value(algorithm, stage, track))[0].sum()) for stage, track in (short, long)]
    assert sizes == pytest.approx([-1.0, -1.0], rel=1e-12)


def three_tokens(advantage: float, log_ratios: list[float]) -> tuple[LeafStage, RolloutTrack]:
    stage, track = ragged(0, (len(log_ratios),))
    segment = track.segment.replace(
        loss_mask=torch.ones(len(log_ratios), dtype=torch.bool),
        anchors={"old_logp": stage.logp.detach() - double(log_ratios)},
    )
    return stage, track.replace(segment=segment, advantages=double([advantage]))


def double(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
