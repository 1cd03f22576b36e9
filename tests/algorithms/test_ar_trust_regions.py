"""Trust regions without a clip: penalties (DRPO, SPO), masks (DPPO, CPPO), a gate (SAPO), bounded weights (CISPO)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.ragged import LeafStage, assert_same_gradient, looped, ragged, value
from unirl.algorithms.ar_trust_regions import (
    CISPO,
    CPPO,
    DPPO,
    DRPO,
    SAPO,
    binary_kl,
    binary_tv,
    within_prefix_budget,
)
from unirl.algorithms.base import START
from unirl.algorithms.shared.packed import RowOffsets
from unirl.algorithms.shared.tokens import TokenLoss, Tokens
from unirl.types.results import values
from unirl.types.rollout_resp import RolloutTrack

LOG_PROBS = st.floats(-8, -0.01)
ADVANTAGES = st.floats(-3, 3)


def tensor(*numbers: float, grad: bool = False) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)


def slope_of(losses: Tensor, logp: Tensor) -> float:
    return float(torch.autograd.grad(losses.sum(), logp)[0])


def losses_of(algorithm: TokenLoss, log_ratio: Tensor, old: float, advantage: float) -> Tensor:
    """The policy loss of one token whose log-prob was `old`."""
    one = torch.ones(1, dtype=torch.bool)
    rows = RowOffsets.of(torch.tensor([0, 1]), one, one)
    old_logp = tensor(old)
    tokens = Tokens(log_ratio + old, old_logp, log_ratio, tensor(advantage), tensor(1.0), rows)
    return algorithm.surrogate(tokens, START).losses


# DRPO and SPO


@settings(deadline=None)
@given(logp=LOG_PROBS, old=LOG_PROBS, advantage=ADVANTAGES, epsilon=st.floats(0.05, 20))
def test_drpo_has_the_papers_gradient(logp: float, old: float, advantage: float, epsilon: float) -> None:
    new, mu = tensor(logp, grad=True), math.exp(old)
    losses = losses_of(DRPO(drpo_epsilon=epsilon), new - old, old, advantage)
    ratio, moved = math.exp(logp - old), abs(math.exp(logp) - mu)
    away = math.copysign(1.0, advantage * (ratio - 1)) if advantage * (ratio - 1) else 0.0
    want = -advantage * ratio * (1 - away * moved / epsilon)
    assert slope_of(losses, new) == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_drpo_of_rare_tokens_is_the_plain_gradient_and_spo_is_drpo_with_mu_one() -> None:
    stage, track = ragged(0)
    rare = shifted(stage, track, -60.0)
    plain = looped(stage, rare, lambda row: -row.advantage * row.ratio, "token-mean")
    assert_same_gradient(stage, value(DRPO(drpo_epsilon=0.3), stage, rare), plain)
    certain, same_move = 0.0, tensor(0.3)
    drpo = losses_of(DRPO(drpo_epsilon=0.2), same_move, certain, 2.0)
    assert drpo.item() == losses_of(DRPO(drpo_epsilon=0.2, penalty_mu_weighted=False), same_move, -1.0, 2.0).item()
    spo = -2 * math.exp(0.3) + 2 * (math.exp(0.3) - 1) ** 2 / 0.4
    assert drpo.item() == pytest.approx(spo, rel=1e-12)


def shifted(stage: LeafStage, track: RolloutTrack, by: float) -> RolloutTrack:
    """Both policies' log-probs moved by one number: the ratios stay, the probabilities do not."""
    with torch.no_grad():
        stage.logp += by
    anchors = {name: column + by for name, column in track.segment.anchors.items()}
    return track.replace(segment=track.segment.replace(anchors=anchors))


def test_drpo_counts_tokens_whose_gradient_has_changed_sign() -> None:
    stage, track = ragged(0, (4,))
    old = tensor(*[math.log(p) for p in (0.5, 0.5, 0.7, 0.01)])
    with torch.no_grad():
        stage.logp[:] = tensor(*[math.log(p) for p in (0.71, 0.29, 0.49, 0.2)])
    segment = track.segment.replace(loss_mask=torch.ones(4, dtype=torch.bool), anchors={"old_logp": old})
    track = track.replace(segment=segment, advantages=tensor(1.0), weight=tensor(1.0))
    algorithm = DRPO(drpo_epsilon=0.2)
    result = values(algorithm.loss(stage, track, (0,)).metrics)
    assert (result["train/clip_fraction_high"], result["train/clip_fraction_low"]) == (0.25, 0.5)
    gradient = stage.gradients(value(algorithm, stage, track))[0]
    assert [bool(g < 0) for g in gradient] == [False, True, True, True]  # only the first is pulled back


# DPPO and CPPO


@settings(deadline=None)
@given(logp=LOG_PROBS, old=LOG_PROBS)
def test_divergences_of_a_token_are_those_of_two_bernoullis(logp: float, old: float) -> None:
    bernoulli = torch.distributions.Bernoulli
    mu, pi = bernoulli(probs=tensor(math.exp(old))), bernoulli(probs=tensor(math.exp(logp)))
    kl = torch.distributions.kl_divergence(mu, pi)
    assert binary_kl(tensor(logp), tensor(old)).item() == pytest.approx(kl.item(), rel=1e-5, abs=1e-7)
    assert binary_tv(tensor(logp), tensor(old)).item() == pytest.approx(abs(math.exp(logp) - math.exp(old)), rel=1e-12)


@pytest.mark.parametrize("algorithm", [DPPO(delta=1e9), DPPO(divergence="kl", delta=1e9), CPPO(delta=1e9, delta_b=1e9)])
def test_without_a_bound_no_token_is_dropped(algorithm: TokenLoss) -> None:
    stage, track = ragged(0)
    plain = looped(stage, track, lambda row: -row.advantage * row.ratio, "token-mean")
    assert_same_gradient(stage, value(algorithm, stage, track), plain)
    assert values(algorithm.loss(stage, track, (0,)).metrics)["train/clip_fraction"] == 0.0


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.2])
def test_cppo_without_weights_and_with_an_unlimited_budget_is_dppo(delta: float) -> None:
    stage, track = ragged(3)
    cppo, dppo = CPPO(delta=delta, w_min=1.0, delta_b=1e9), DPPO(delta=delta)
    assert_same_gradient(stage, value(cppo, stage, track), value(dppo, stage, track))


@pytest.mark.parametrize("algorithm", [DPPO(delta=1e-9), DPPO(divergence="kl", delta=1e-12), CPPO(delta=1e-9)])
def test_a_bound_of_zero_trains_exactly_the_tokens_that_move_back(algorithm: TokenLoss) -> None:
    stage, track = ragged(1)
    back = looped(
        stage,
        track,
        lambda row: torch.where(row.advantage * (row.ratio - 1) <= 0, -row.advantage * row.ratio, 0.0),
        "token-mean",
    )
    assert_same_gradient(stage, value(algorithm, stage, track), back)
    result = values(algorithm.loss(stage, track, (0,)).metrics)
    assert 0.2 < result["train/clip_fraction"] < 0.8
    assert result["train/clip_fraction"] == pytest.approx(
        result["train/clip_fraction_high"] + result["train/clip_fraction_low"]
    )


def test_dppo_keeps_a_rare_token_with_a_large_ratio_and_drops_a_likely_one_with_a_small_one() -> None:
    stage, track = ragged(0, (2,))
    with torch.no_grad():
        stage.logp[:] = tensor(math.log(0.01), math.log(0.9))
    segment = track.segment.replace(
        loss_mask=torch.ones(2, dtype=torch.bool), anchors={"old_logp": tensor(math.log(0.001), math.log(0.7))}
    )
    track = track.replace(segment=segment, advantages=tensor(1.0))
    slopes = stage.gradients(value(DPPO(delta=0.15), stage, track))[0] * 2
    assert slopes.tolist() == pytest.approx([-10.0, 0.0], rel=1e-12)
    capped = stage.gradients(value(DPPO(delta=0.15, ratio_cap=4.0), stage, track))[0] * 2
    assert capped.tolist() == pytest.approx([-4.0, 0.0], rel=1e-12)


def test_dppo_has_a_bound_of_its_own_for_tokens_that_became_more_likely() -> None:
    stage, track = ragged(0, (2,))
    with torch.no_grad():
        stage.logp[:] = tensor(math.log(0.6), math.log(0.4))
    segment = track.segment.replace(
        loss_mask=torch.ones(2, dtype=torch.bool), anchors={"old_logp": tensor(math.log(0.5), math.log(0.5))}
    )
    track = track.replace(segment=segment)
    for advantage, dropped in ((1.0, [False, False]), (-1.0, [False, True])):
        rows = track.replace(advantages=tensor(advantage))
        result = stage.gradients(value(DPPO(delta=0.05, delta_high=0.2), stage, rows))[0] == 0
        assert result.tolist() == dropped


def dropped(algorithm: TokenLoss, pairs: list[tuple[float, float]]) -> list[bool]:
    """Which tokens of one response of advantage 1 have lost their gradient; (pi, mu) of each."""
    stage, track = ragged(0, (len(pairs),))
    with torch.no_grad():
        stage.logp[:] = tensor(*[math.log(pi) for pi, _ in pairs])
    old = tensor(*[math.log(mu) for _, mu in pairs])
    mask = torch.ones(len(pairs), dtype=torch.bool)
    track = track.replace(
        segment=track.segment.replace(loss_mask=mask, anchors={"old_logp": old}),
        advantages=tensor(1.0),
        weight=tensor(1.0),
    )
    return (stage.gradients(value(algorithm, stage, track))[0] == 0).tolist()


def test_the_kl_of_dppo_is_that_from_the_old_policy_to_the_new() -> None:
    # KL(Bernoulli(0.5) || Bernoulli(0.9)) = 0.51, and the other way round 0.37
    assert dropped(DPPO(divergence="kl", delta=0.44), [(0.9, 0.5)]) == [True]
    assert dropped(DPPO(divergence="kl", delta=0.52), [(0.9, 0.5)]) == [False]


def test_cppo_weighs_late_tokens_by_w_min_and_gives_every_token_a_budget_by_delta_b() -> None:
    late = [(0.5, 0.5), (0.5, 0.5), (0.65, 0.5)]
    for w_min, lost in ((1.0, True), (0.5, False)):
        assert dropped(CPPO(delta=0.1, w_min=w_min), late) == [False, False, lost]
    twice = [(0.59, 0.5), (0.59, 0.5)]
    for delta_b, lost in ((0.02, True), (0.1, False)):
        assert dropped(CPPO(delta=0.1, w_min=1.0, delta_b=delta_b), twice) == [False, lost]


def test_cppo_trains_an_unmoved_token_after_any_prefix() -> None:
    assert dropped(CPPO(delta=0.1, delta_b=0.001), [(0.9, 0.5), (0.5, 0.5)]) == [True, False]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(0, 0.3), st.booleans()), max_size=8), min_size=1, max_size=4),
    st.floats(0.3, 1.0),
    st.floats(0.01, 0.1),
)
def test_the_prefix_budget_equals_that_of_the_paper(
    rows: list[list[tuple[float, bool]]], w_min: float, delta_b: float
) -> None:
    delta = 0.15
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    mask = torch.tensor([counts for row in rows for _, counts in row], dtype=torch.bool)
    packed = RowOffsets.of(offsets, mask, torch.ones(len(rows), dtype=torch.bool))
    moved = packed.masked(tensor(*[divergence for row in rows for divergence, _ in row]))
    result = within_prefix_budget(moved, packed, delta, w_min, delta_b)[mask].tolist()
    want = []
    for row in rows:
        kept = [divergence for divergence, counts in row if counts]
        budget = min(max(float(tensor(*kept).quantile(0.9)), delta_b), 2 * delta_b) if kept else 0.0
        weights = [1 - (1 - w_min) * t / max(len(kept) - 1, 1) for t in range(len(kept))]
        spent = [weight * divergence for weight, divergence in zip(weights, kept, strict=True)]
        left = [min(delta, delta + budget * sum(weights[:t]) - sum(spent[:t])) for t in range(len(kept))]
        want += [cost - limit for cost, limit in zip(spent, left, strict=True)]
    assert all(near == (gap <= 0) for near, gap in zip(result, want, strict=True) if abs(gap) > 1e-9)


def test_a_prefix_that_has_drifted_leaves_no_budget_for_later_tokens() -> None:
    rows = RowOffsets.of(torch.tensor([0, 6, 9]), torch.ones(9, dtype=torch.bool), torch.tensor([True, True]))
    moved = tensor(0.19, 0.19, 0.19, 0.0, 0.19, 0.0, 0.0, 0.0, 0.19)
    result = within_prefix_budget(moved, rows, delta=0.2, w_min=1.0, delta_b=0.02)
    # allowance 0.04 a token: left before tokens 0 to 5 of row 0: 0.2, 0.05, ...; row 1 has its whole budget
    assert result.tolist() == [True, False, False, False, False, False, True, True, True]
    assert within_prefix_budget(moved, rows, delta=0.2, w_min=1.0, delta_b=0.2).all()


# SAPO and CISPO


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.3), (-2.0, 1.7)])
def test_sapo_is_the_plain_gradient_at_ratio_one_and_decreases_on_both_sides(advantage: float, tau: float) -> None:
    sapo = SAPO(tau_pos=1.3, tau_neg=1.7)

    def slope(log_ratio: float) -> float:
        x = tensor(log_ratio, grad=True)
        return slope_of(losses_of(sapo, x, -1.0, advantage), x)

    assert losses_of(sapo, tensor(0.0), -1.0, advantage).item() == pytest.approx(-advantage * 2 / tau)
    assert slope(0.0) == pytest.approx(-advantage, rel=1e-12)
    gate = 1 / (1 + math.exp(-tau * (math.e - 1)))
    assert slope(1.0) == pytest.approx(-advantage * math.e * 4 * gate * (1 - gate), rel=1e-12)
    assert abs(slope(3.0)) < 1e-6 * abs(advantage) and abs(slope(-3.0)) < 0.1 * abs(advantage)


def test_sapo_decreases_faster_for_negative_advantages() -> None:
    x = tensor(1.0, grad=True)
    up, down = (abs(slope_of(losses_of(SAPO(), x, -1.0, a), x)) for a in (1.0, -1.0))
    assert down < up


@settings(deadline=None)
@given(log_ratio=st.floats(-19, 19), advantage=ADVANTAGES.filter(lambda a: abs(a) > 1e-3))
def test_cispo_has_a_gradient_at_every_token_and_weights_within_its_bounds(log_ratio: float, advantage: float) -> None:
    x = tensor(-1.0, grad=True)
    losses = losses_of(CISPO(clip_range=0.8, clip_range_high=4.0), x - (-1.0 - log_ratio), -1.0 - log_ratio, advantage)
    weight = min(max(math.exp(log_ratio), 0.2), 5.0)
    assert slope_of(losses, x) == pytest.approx(-advantage * weight, rel=1e-9)


def test_cispo_has_no_lower_bound_unless_it_is_given() -> None:
    stage, track = ragged(0)
    want = looped(stage, track, lambda r: -r.ratio.detach().clamp(max=1.5) * r.advantage * r.new, "token-mean")
    assert_same_gradient(stage, value(CISPO(clip_range_high=0.5), stage, track), want)


# What a recipe may not say


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (DRPO, {"drpo_epsilon": 0.0}),
        (DPPO, {"delta": 0.0}),
        (DPPO, {"delta_high": -0.1}),
        (DPPO, {"ratio_cap": 1.0}),
        (CPPO, {"delta": 0.0}),
        (CPPO, {"w_min": 0.0}),
        (CPPO, {"delta_b": 0.0}),
        (SAPO, {"tau_pos": 0.0}),
        (SAPO, {"tau_neg": -1.0}),
        (CISPO, {"clip_range": 1.0}),
        (CISPO, {"clip_range_high": math.inf}),
    ],
)
def test_settings_out_of_range_are_refused(loss: type[TokenLoss], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.{next(iter(options))}"):
        loss(**options)
