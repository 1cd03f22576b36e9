"""What holds for every loss over tokens, on random ragged rows: its paper's equation, any cut, context left alone."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import (
    AGGREGATIONS,
    DROPPED,
    LeafStage,
    Sequence,
    assert_same_gradient,
    looped,
    ragged,
    value,
)
from tests.tokens import TokenSampling, token_stage, token_track
from unirl.algorithms.ar_grpo import ARGRPO, GSPO
from unirl.algorithms.ar_trust_regions import CISPO, CPPO, DPPO, DRPO, GMPO, SAPO
from unirl.algorithms.shared.mismatch import MaskedIS, SequenceTIS, TokenTIS
from unirl.algorithms.shared.tokens import TokenLoss
from unirl.testing.algorithm import check_algorithm
from unirl.types.results import merge, values
from unirl.types.rollout_resp import RolloutTrack

# Every loss once more, from its paper, one sequence at a time


def clipped(row: Sequence, low: float, high: float) -> Tensor:
    gain = torch.minimum(row.ratio * row.advantage, row.ratio.clamp(1 - low, 1 + high) * row.advantage)
    return -gain


def dual_clipped(row: Sequence) -> Tensor:
    gain = torch.minimum(row.ratio * row.advantage, row.ratio.clamp(0.8, 1.2) * row.advantage)
    return -(torch.maximum(gain, 1.5 * row.advantage) if row.advantage < 0 else gain)


def by_sequence(row: Sequence) -> Tensor:
    s = (row.new - row.old).mean().exp()
    return -torch.minimum(s * row.advantage, s.clamp(0.9, 1.15) * row.advantage).expand(len(row.new))


def clipped_weight(row: Sequence) -> Tensor:
    return -row.ratio.detach().clamp(0.7, 1.5) * row.advantage * row.new


def divergence_penalty(row: Sequence, mu_weighted: bool) -> Tensor:
    mu = row.old.exp() if mu_weighted else 1.0
    return -row.advantage * row.ratio + row.advantage.abs() * mu * (row.ratio - 1) ** 2 / (2 * 0.3)


def total_variation_mask(row: Sequence) -> Tensor:
    kept = (row.advantage * (row.ratio - 1) <= 0) | ((row.new.exp() - row.old.exp()).abs() <= 0.05)
    return -row.advantage * row.ratio * kept


def binary_kl_mask(row: Sequence) -> Tensor:
    pi, mu = row.new.exp(), row.old.exp()
    divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu + 1e-8) / (1 - pi + 1e-8)).log()
    kept = (row.advantage * (row.ratio - 1) <= 0) | (divergence <= torch.where(pi > mu, 0.02, 0.01))
    return -row.advantage * row.ratio * kept


def prefix_mask(row: Sequence) -> Tensor:
    divergence = (row.new.exp() - row.old.exp()).abs().detach()
    n = len(divergence)
    weight = [1 - 0.2 * t / max(n - 1, 1) for t in range(n)]
    budget = float(torch.quantile(divergence, 0.9).clamp(0.02, 0.04))
    kept = []
    for t in range(n):
        spent = sum(weight[s] * float(divergence[s]) for s in range(t))
        left = min(0.1, 0.1 + budget * sum(weight[:t]) - spent)
        returning = float(row.advantage * (row.ratio[t].detach() - 1)) <= 0
        kept.append(returning or weight[t] * float(divergence[t]) <= left)
    return -row.advantage * row.ratio * torch.tensor(kept)


def soft_gated(row: Sequence) -> Tensor:
    tau = 1.0 if row.advantage > 0 else 1.05
    return -row.advantage * (4 / tau) * torch.sigmoid(tau * (row.ratio - 1))


def geometric_mean(row: Sequence) -> Tensor:
    delta, sign = row.new - row.old, row.advantage.sign()
    bounded = sign * torch.minimum(sign * delta, sign * delta.clamp(-0.4, 0.3))
    return (-row.advantage * bounded.mean().exp()).expand(len(row.new))


@dataclass(frozen=True)
class Case:
    loss: type[TokenLoss]
    options: dict[str, Any]
    per_token: Callable[[Sequence], Tensor]

    def make(self, **more: Any) -> TokenLoss:
        return self.loss(**(self.options | more))


CASES = {
    "grpo": Case(ARGRPO, {"clip_range": 0.2, "clip_range_high": 0.28}, lambda row: clipped(row, 0.2, 0.28)),
    "dual clip": Case(ARGRPO, {"dual_clip": 1.5}, dual_clipped),
    "gspo": Case(GSPO, {"clip_range": 0.1, "clip_range_high": 0.15}, by_sequence),
    "cispo": Case(CISPO, {"clip_range": 0.3, "clip_range_high": 0.5}, clipped_weight),
    "drpo": Case(DRPO, {"drpo_epsilon": 0.3}, lambda row: divergence_penalty(row, True)),
    "spo": Case(DRPO, {"drpo_epsilon": 0.3, "penalty_mu_weighted": False}, lambda row: divergence_penalty(row, False)),
    "dppo-tv": Case(DPPO, {"delta": 0.05}, total_variation_mask),
    "dppo-kl": Case(DPPO, {"divergence": "kl", "delta": 0.01, "delta_high": 0.02}, binary_kl_mask),
    "cppo": Case(CPPO, {"delta": 0.1}, prefix_mask),
    "sapo": Case(SAPO, {}, soft_gated),
    "gmpo": Case(GMPO, {"clip_range_high": 0.3}, geometric_mean),
}
EVERY_LOSS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
EVERY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["loss_agg_mode"])


@EVERY_LOSS
@EVERY_AGGREGATION
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_those_of_a_loop_over_sequences(
    case: Case, aggregation: dict[str, Any], seed: int
) -> None:
    stage, track = ragged(seed)
    want = looped(stage, track, case.per_token, **aggregation)
    assert_same_gradient(stage, value(case.make(**aggregation), stage, track), want)


@EVERY_LOSS
def test_the_random_rows_reach_every_branch_of_every_loss(case: Case) -> None:
    """So that the comparison above sees clips, masks and penalties: the loss is not that of plain ratios."""
    stage, track = ragged(0)
    plain = looped(stage, track, lambda row: -row.advantage * row.ratio, "token-mean")
    bent = value(case.make(loss_agg_mode="token-mean"), stage, track)
    gaps = stage.gradients(plain)[0] - stage.gradients(bent)[0]
    assert float(gaps.abs().max()) > 1e-3


@EVERY_LOSS
@EVERY_AGGREGATION
@pytest.mark.parametrize("cut", [[1] * 7, [3, 4], [2, 2, 3], [6, 1]], ids=str)
def test_every_division_into_micro_batches_gives_the_same_loss(
    case: Case, aggregation: dict[str, Any], cut: list[int]
) -> None:
    stage, track = ragged(1)
    algorithm = case.make(entropy_coef=0.1, kl_coef=0.2, mismatch=SequenceTIS(cap=1.05), **aggregation)
    bounds = [sum(cut[:i]) for i in range(len(cut) + 1)]
    pieces = [track.slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    results = [algorithm.loss(stage, piece, (0,)) for piece in pieces]
    total = sum(algorithm.count(piece) for piece in pieces)
    assert_same_gradient(stage, sum(r.loss for r in results) / total, value(algorithm, stage, track))
    whole, apart = values(algorithm.loss(stage, track, (0,)).metrics), values(merge(r.metrics for r in results))
    assert whole == pytest.approx(apart, rel=1e-6, abs=1e-9)


@EVERY_LOSS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_values_at_uncounted_tokens_have_no_effect(case: Case, poison: float) -> None:
    algorithm = case.make(entropy_coef=0.1, kl_coef=0.2, mismatch=SequenceTIS(cap=1.05), loss_agg_mode="token-mean")
    stage, track = ragged(2)
    clean = value(algorithm, stage, track)
    gradients = stage.gradients(clean)
    spoilt, ill = poisoned(stage, track, poison)
    actual = value(algorithm, spoilt, ill)
    assert torch.equal(actual, clean)
    for have, want in zip(spoilt.gradients(actual), gradients, strict=True):
        assert torch.equal(have, want)
    metrics = values(algorithm.loss(spoilt, ill, (0,)).metrics)
    assert metrics == values(algorithm.loss(stage, track, (0,)).metrics)
    tokens = algorithm.tokens(spoilt.logp.detach(), ill, (0,))
    seen = (tokens.logp, tokens.old_logp, tokens.log_ratio, tokens.advantages, tokens.weights)
    assert not any(bool(column[~tokens.rows.token_mask].any()) for column in seen)
    assert algorithm.parity(ill, (0,), {"logp": spoilt.logp.detach()})["rollout/parity_absdiff_max"].value < 10


def poisoned(stage: LeafStage, track: RolloutTrack, poison: float) -> tuple[LeafStage, RolloutTrack]:
    """`poison` at every context token and in all of the row of weight 0."""
    segment = track.segment
    dead = torch.zeros(len(track), dtype=torch.bool)
    dead[DROPPED] = True
    gone = ~segment.loss_mask | dead.repeat_interleave(segment.lengths)

    def spoil(values: Tensor) -> Tensor:
        return values.detach().masked_fill(gone, poison)

    anchors = {name: spoil(column) for name, column in segment.anchors.items()}
    ill = segment.replace(logp=spoil(segment.logp), anchors=anchors)
    advantages = track.advantages.masked_fill(dead, poison)
    return LeafStage(spoil(stage.logp), spoil(stage.entropy)), track.replace(segment=ill, advantages=advantages)


@EVERY_LOSS
@EVERY_AGGREGATION
def test_a_sequence_without_counted_tokens_has_loss_zero(case: Case, aggregation: dict[str, Any]) -> None:
    stage, track = ragged(3, (4, 6))
    track = track.replace(weight=torch.ones(2, dtype=torch.float64))
    mask = track.segment.loss_mask.clone()
    mask[:4] = False
    masked = track.replace(segment=track.segment.replace(loss_mask=mask))
    algorithm = case.make(**aggregation)
    both, alone = (value(algorithm, stage, rows).item() for rows in (masked, masked.slice(1, 2)))
    share = 1.0 if aggregation["loss_agg_mode"] == "token-mean" else 0.5
    assert both == pytest.approx(share * alone, rel=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("more", [{}, {"kl_in": "reward", "kl_estimator": "k1"}], ids=["kl in loss", "kl in reward"])
def test_no_loss_syncs_with_its_device_or_mixes_devices(case: Case, more: dict[str, Any]) -> None:
    stage, track = ragged(0)
    far = LeafStage(stage.logp.detach().to("meta"), stage.entropy.detach().to("meta"))  # tensors without values
    algorithm = case.make(
        kl_coef=0.1, entropy_coef=0.1, mismatch=MaskedIS(), loss_agg_mode="seq-mean-token-mean", **more
    )
    result = algorithm.loss(far, track.to("meta"), (0,))
    result.loss.backward()
    assert far.logp.grad is not None and far.logp.grad.device.type == "meta"
    algorithm.parity(track.to("meta"), (0,), result.outputs)


@EVERY_LOSS
def test_nothing_to_train_is_a_loss_of_zero_with_a_gradient_of_zero(case: Case) -> None:
    stage, track = ragged(0, (0, 0))
    result = case.make().loss(stage, track, (0,))
    assert float(result.loss.detach()) == 0.0 and not stage.gradients(result.loss)[0].any()
    assert all(math.isfinite(number) for number in values(result.metrics).values())


@EVERY_LOSS
def test_a_ratio_beyond_e_to_the_20_stays_finite(case: Case) -> None:
    stage, track = ragged(0)
    far = track.segment.anchors["old_logp"] - 500.0
    track = track.replace(segment=track.segment.replace(anchors={"old_logp": far, "ref_logp": far}))
    actual = value(case.make(kl_coef=0.1), stage, track)
    assert actual.isfinite() and stage.gradients(actual)[0].isfinite().all()


@EVERY_LOSS
@pytest.mark.parametrize(("moved", "side", "other"), [(2.0, "high", "low"), (-2.0, "low", "high")])
def test_tokens_outside_the_trust_region_are_counted_by_side(case: Case, moved: float, side: str, other: str) -> None:
    stage, track = ragged(0)
    with torch.no_grad():
        stage.logp += min(moved, 0.0) - 0.1  # so that no probability is beyond 1
    segment = track.segment.replace(anchors={"old_logp": stage.logp.detach() - moved})
    track = track.replace(segment=segment, advantages=math.copysign(1.0, moved) * track.advantages.abs())
    metrics = values(case.make().loss(stage, track, (0,)).metrics)
    assert metrics[f"train/clip_fraction_{other}"] == 0.0
    assert (metrics[f"train/clip_fraction_{side}"] > 0.0) == (case.loss is not SAPO)


@EVERY_LOSS
def test_at_ratio_one_the_gradient_is_minus_advantage_times_that_of_log_prob(case: Case) -> None:
    stage, track = ragged(0)
    track = track.replace(segment=track.segment.replace(anchors={}))  # as in the first update
    actual = value(case.make(loss_agg_mode="token-mean"), stage, track)
    want = looped(stage, track_with_old(stage, track), lambda row: -row.advantage * row.new, "token-mean")
    assert torch.allclose(stage.gradients(actual)[0], stage.gradients(want)[0], rtol=1e-12, atol=1e-15)
    metrics = values(case.make().loss(stage, track, (0,)).metrics)
    assert (metrics["train/ratio_mean"], metrics["train/ratio_std"], metrics["train/approx_kl"]) == (1.0, 0.0, 0.0)
    assert (metrics["train/ratio_min"], metrics["train/ratio_max"], metrics["train/clip_fraction"]) == (1.0, 1.0, 0.0)


def track_with_old(stage: LeafStage, track: RolloutTrack) -> RolloutTrack:
    own = stage.logp.detach()
    return track.replace(segment=track.segment.replace(anchors={"old_logp": own, "ref_logp": own}))


@EVERY_LOSS
@pytest.mark.parametrize(
    "more",
    [
        {"old_logp_source": "rollout"},
        {"loss_agg_mode": "seq-mean-token-mean", "entropy_coef": 0.1, "mismatch": TokenTIS()},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 6, "kl_coef": 0.1, "mismatch": MaskedIS()},
        {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "old_logp_source": "rollout"},
    ],
    ids=["rollout", "entropy", "kl", "kl in reward"],
)
def test_every_loss_keeps_the_contract_of_losses_off_policy(case: Case, more: dict[str, Any]) -> None:
    track = token_track(token_stage(seed=1), params=TokenSampling(temperature=0.7))
    check_algorithm(case.make(**more), token_stage(seed=0), track)
