"""Corrections of an engine's numerics: their definitions, what they leave alone, and what is logged of them."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import Sequence, assert_same_gradient, looped, ragged, value
from tests.tokens import token_stage, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.shared.mismatch import Correction, GeometricRejection, MaskedIS, SequenceTIS, TokenTIS
from unirl.algorithms.shared.packed import RowOffsets
from unirl.config.errors import ConfigError
from unirl.types.results import values
from unirl.types.segments import TextSegment

ROWS = RowOffsets.of(torch.tensor([0, 3, 3, 5]), torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.bool))
GAPS = torch.tensor([0.1, -0.2, 1.0, -1.5, 0.3], dtype=torch.float64)
ALL: list[Correction] = [TokenTIS(), SequenceTIS(), MaskedIS(), GeometricRejection()]


@pytest.mark.parametrize(
    ("correction", "weights", "cut"),
    [
        (TokenTIS(cap=2.0), [math.exp(0.1), math.exp(-0.2), 2.0, math.exp(-1.5), math.exp(0.3)], [0, 0, 1, 0, 0]),
        (SequenceTIS(cap=2.0), [2.0] * 3 + [math.exp(-1.2)] * 2, [1, 1, 1, 0, 0]),
        (MaskedIS(low=0.5, high=2.0), [math.exp(0.1), math.exp(-0.2), 0.0, 0.0, math.exp(0.3)], [0, 0, 1, 1, 0]),
        (GeometricRejection(low=0.6, high=1.3), [0.0] * 3 + [0.0] * 2, [1, 1, 1, 1, 1]),
        (GeometricRejection(low=0.5, high=1.3), [0.0] * 3 + [1.0] * 2, [1, 1, 1, 0, 0]),
        (GeometricRejection(low=0.5, high=1.4), [1.0] * 5, [0] * 5),
    ],
)
def test_each_correction_is_its_definition(correction: Correction, weights: list[float], cut: list[int]) -> None:
    actual = correction(GAPS, ROWS)  # means of the rows: exp(0.3) = 1.35 and exp(-0.6) = 0.549
    assert actual.weights.tolist() == pytest.approx(weights, rel=1e-12)
    assert actual.cut.int().tolist() == cut


@pytest.mark.parametrize("correction", ALL, ids=lambda c: type(c).__name__)
def test_an_engine_that_agrees_is_not_corrected(correction: Correction) -> None:
    stage = token_stage()
    track = token_track(stage)
    plain = ARGRPO().loss(stage, track, (0,))
    result = ARGRPO(mismatch=correction).loss(stage, track, (0,))
    assert torch.equal(result.loss, plain.loss)
    actual = values(result.metrics)
    assert (actual["train/mismatch_weight"], actual["train/mismatch_cut"], actual["train/mismatch_kl"]) == (
        1.0,
        0.0,
        0.0,
    )


def weight_of(row: Sequence, correction: Correction) -> Tensor:
    gap = row.old - row.engine
    if type(correction) is TokenTIS:
        return gap.exp().clamp(max=correction.cap)
    if isinstance(correction, SequenceTIS):
        return gap.sum().exp().clamp(max=correction.cap)
    if type(correction) is MaskedIS:
        return torch.where((gap.exp() < correction.low) | (gap.exp() > correction.high), 0.0, gap.exp())
    assert isinstance(correction, GeometricRejection)
    return (correction.low <= gap.mean().exp() <= correction.high) * torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize(
    "correction",
    [TokenTIS(cap=1.05), SequenceTIS(cap=1.02), MaskedIS(low=0.9, high=1.1), GeometricRejection(low=0.98, high=1.02)],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_surrogate_is_weighted_and_nothing_else_is(correction: Correction, mode: str) -> None:
    stage, track = ragged(1)
    algorithm = ARGRPO(mismatch=correction, loss_agg_mode=mode, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.1)  # type: ignore[arg-type]

    def per_token(row: Sequence) -> Tensor:
        gain = torch.minimum(row.ratio * row.advantage, row.ratio.clamp(0.8, 1.2) * row.advantage)
        return -weight_of(row, correction) * gain + 0.1 * (row.new - row.ref) ** 2 / 2 - 0.1 * row.entropy

    assert_same_gradient(stage, value(algorithm, stage, track), looped(stage, track, per_token, mode))
    actual = values(algorithm.loss(stage, track, (0,)).metrics)
    weight = looped(stage, track, lambda row: weight_of(row, correction).expand(len(row.new)), "token-mean")
    gap_kl = looped(stage, track, lambda row: (row.old - row.engine).exp() - 1 - (row.old - row.engine), "token-mean")
    assert actual["train/mismatch_weight"] == pytest.approx(weight.item(), rel=1e-9)
    assert actual["train/mismatch_kl"] == pytest.approx(gap_kl.item(), rel=1e-9)
    assert 0.0 < actual["train/mismatch_cut"] < 1.0


def test_in_the_first_update_the_training_forward_is_the_old_policy() -> None:
    stage, track = ragged(2)
    first = track.replace(segment=track.segment.replace(anchors={}))
    own = track.replace(segment=track.segment.replace(anchors={"old_logp": stage.logp.detach()}))
    algorithm = ARGRPO(mismatch=TokenTIS(cap=1.3))
    assert_same_gradient(stage, value(algorithm, stage, first), value(algorithm, stage, own))
    assert algorithm.needs.behaviour_logp


@pytest.mark.parametrize("correction", [*ALL, TokenTIS(cap=math.inf), SequenceTIS(cap=math.inf)], ids=str)
def test_an_infinite_gap_gives_a_finite_weight(correction: Correction) -> None:
    gaps = torch.tensor([500.0, -500.0, 0.0, 0.0, -900.0])
    assert correction(gaps, ROWS).weights.isfinite().all()


def test_weighted_samples_of_the_engine_have_the_trainers_expectations() -> None:
    full = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    engine = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    rows = RowOffsets.of(torch.arange(5), torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool))
    weights = TokenTIS(cap=9.0)((full / engine).log(), rows).weights
    assert torch.allclose(engine * weights, full, rtol=1e-12)


@pytest.mark.parametrize("is_corrected", [True, False])
def test_stale_samples_give_the_policy_gradient_only_with_the_weights(is_corrected: bool) -> None:
    """Every first token is a sample. Its weight is its probability under the earlier weights, so nothing is random.

    The true gradient of J = sum_a pi(a) r(a) is pi(a) (r(a) - J). Without the weights it is, in expectation, that of
    sum_a b(a) r(a) log pi(a), which is another direction.
    """
    stage = token_stage()
    actions = stage.table.vocabulary
    earlier = torch.tensor([0.05, 0.35, 0.3, 0.2, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.2, -0.4, 0.7, 0.1], dtype=torch.float64)
    whole = token_track(stage, prompts=1)
    track = whole.select([0] * actions).replace(
        segment=TextSegment(
            tokens=torch.arange(actions),
            logp=earlier.log(),
            loss_mask=torch.ones(actions, dtype=torch.bool),
            offsets=torch.arange(actions + 1),
            finished=torch.ones(actions, dtype=torch.bool),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            anchors={},
        ),
        advantages=rewards,
        weight=earlier,
    )
    algorithm = ARGRPO(mismatch=TokenTIS(cap=1e9) if is_corrected else None)
    stage.table.zero_grad()
    algorithm.loss(stage, track, (0,)).loss.backward()
    have = -stage.table.table.grad[0, actions].double()  # the line of the first prompt before any token
    policy = stage.table.table[0, actions].double().softmax(0).detach()
    true = policy * (rewards - (policy * rewards).sum())
    if is_corrected:
        assert torch.allclose(have, true, atol=1e-6)
    else:
        stale = earlier * rewards - policy * (earlier * rewards).sum()
        assert torch.allclose(have, stale, atol=1e-6) and not torch.allclose(have, true, atol=1e-2)


@pytest.mark.parametrize("make", [TokenTIS, SequenceTIS])
def test_a_cap_below_one_is_refused(make: type[TokenTIS]) -> None:
    with pytest.raises(ConfigError, match=r"mismatch\.cap"):
        make(cap=0.9)


@pytest.mark.parametrize("make", [MaskedIS, GeometricRejection])
@pytest.mark.parametrize("band", [(1.0, 2.0), (0.5, 1.0), (-0.1, 2.0)])
def test_a_band_without_one_inside_is_refused(make: type[MaskedIS], band: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="enclose 1"):
        make(low=band[0], high=band[1])
