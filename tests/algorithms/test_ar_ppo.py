"""PPO with a critic on tokens: against its equations in float64, and the contract of losses."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.algorithms.ragged import DROPPED, LeafStage, ragged
from tests.tokens import TableStage, TokenSampling, token_stage, token_track
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.shared.critic import StepCredit
from unirl.algorithms.shared.mismatch import SequenceTIS
from unirl.config.build import build, check_node
from unirl.config.errors import ConfigError
from unirl.models.value_head import TokenValueHead
from unirl.testing.algorithm import check_algorithm, prepared_track
from unirl.tracking.metrics import check_names
from unirl.types.protocols import Anchor, TrainingProgress
from unirl.types.results import merge, values
from unirl.types.rollout_resp import RolloutTrack

NOW = TrainingProgress(progress=0.5, kl_scale=2.0)
KL_IN_REWARD: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "discounted": {
        "gamma": 0.9,
        "lam": 0.7,
        "outcome": "rewards",
        "value_clip": 0.05,
        "kl_coef": 0.2,
        "kl_estimator": "k2",
    },
    "monte carlo": {"lam": 1.0, "value_clip": None, "vf_coef": 2.0, "loss_agg_mode": "seq-mean-token-mean"},
    "one step": {"lam": 0.0, "outcome": "rewards", "clip_range_high": 0.3, "loss_agg_mode": "seq-mean-token-sum"},
    "kl in reward": {"outcome": "rewards", "gamma": 0.95} | KL_IN_REWARD,
    "whitened": {"outcome": "rewards", "whiten": True, "loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 9},
    "whitened, kl in reward": {"whiten": True} | KL_IN_REWARD,
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def judged(seed: int, lengths: tuple[int, ...] | None = None) -> tuple[LeafStage, RolloutTrack]:
    """Ragged rows with context tokens and weights 0 to 2, values that are leaves, old values near them, and rewards."""
    stage, track = ragged(seed, *([] if lengths is None else [lengths]))
    generator = torch.Generator().manual_seed(100 + seed)
    stage.value.data = torch.randn(len(stage.value), generator=generator, dtype=torch.float64)
    old = stage.value.detach() + 0.2 * torch.randn(len(stage.value), generator=generator, dtype=torch.float64)
    rewards = 0.5 + torch.randn(len(track), generator=generator, dtype=torch.float64)
    segment = track.segment.replace(anchors={**track.segment.anchors, "old_value": old})
    return stage, track.replace(segment=segment, rewards=rewards)


def in_step(algorithm: ARPPO, track: RolloutTrack, now: TrainingProgress = NOW) -> TrainingProgress:
    """`now`, in a step of exactly these rows."""
    return replace(now, totals=tuple(algorithm.totals(track, now).tolist())) if algorithm.whiten else now


# The equations once more, one row and one token at a time


@dataclass
class Row:
    """The tokens of a row that count, by index, and what each was worth."""

    tokens: list[int]
    advantages: list[float]
    returns: list[float]
    weight: float


def rewards_of(algorithm: ARPPO, track: RolloutTrack, b: int, tokens: list[int], now: TrainingProgress) -> list[float]:
    """The kl_penalty of every token, and the outcome on the last."""
    anchors, outcome = track.segment.anchors, track.rewards if algorithm.outcome == "rewards" else track.advantages
    rewards = [0.0] * len(tokens)
    if algorithm.kl_in == "reward":
        beta = algorithm.kl_coef * now.kl_scale
        rewards = [-beta * float(anchors["old_logp"][t] - anchors["ref_logp"][t]) for t in tokens]
    rewards[-1] += float(outcome[b])
    return rewards


def rows_of(algorithm: ARPPO, track: RolloutTrack, now: TrainingProgress) -> list[Row]:
    rows, old = [], track.segment.anchors["old_value"]
    for b, (start, stop) in enumerate(itertools.pairwise(track.segment.offsets.tolist())):
        weight = float(track.weight[b])
        tokens = [t for t in range(start, stop) if track.segment.loss_mask[t]] if weight > 0 else []
        row = Row(tokens, [], [], weight)
        if tokens:
            rewards, v = rewards_of(algorithm, track, b, tokens, now), [float(old[t]) for t in tokens] + [0.0]
            deltas = [r + algorithm.gamma * v[i + 1] - v[i] for i, r in enumerate(rewards)]
            discount = algorithm.gamma * algorithm.lam
            row.advantages = [sum(discount**k * d for k, d in enumerate(deltas[i:])) for i in range(len(deltas))]
            row.returns = [a + value for a, value in zip(row.advantages, v, strict=False)]
        rows.append(row)
    if algorithm.whiten:
        everything = torch.tensor([a for row in rows for a in row.advantages], dtype=torch.float64)
        mean, scale = float(everything.mean()), 1 / math.sqrt(float(everything.var()) + 1e-8)
        for row in rows:
            row.advantages = [(a - mean) * scale for a in row.advantages]
    return rows


def expected_loss(
    algorithm: ARPPO, track: RolloutTrack, logp: Tensor, state_values: Tensor, now: TrainingProgress = NOW
) -> Tensor:
    """The loss, divided, of log-probs and values [sum L] with their graphs."""
    anchors, (low, high) = track.segment.anchors, algorithm.clip_at(now.progress)
    rows = rows_of(algorithm, track, now)
    total, mode = torch.zeros((), dtype=torch.float64), algorithm.loss_agg_mode
    for row in rows:
        for t, a, target in zip(row.tokens, row.advantages, row.returns, strict=True):
            ratio = (logp[t] - anchors["old_logp"][t]).exp()
            loss = torch.max(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
            v, old = state_values[t], anchors["old_value"][t]
            errors = [(v - target) ** 2]
            if algorithm.value_clip is not None:
                errors.append((v.clamp(old - algorithm.value_clip, old + algorithm.value_clip) - target) ** 2)
            loss = loss + algorithm.vf_coef * torch.stack(errors).max() / 2
            if algorithm.kl_coef and algorithm.kl_in == "loss":
                loss = loss + algorithm.kl_coef * now.kl_scale * (logp[t] - anchors["ref_logp"][t]) ** 2 / 2
            share = {
                "seq-mean-token-mean": 1 / len(row.tokens),
                "seq-mean-token-sum-norm": 1 / (algorithm.horizon or 1),
            }
            total = total + row.weight * share.get(mode, 1.0) * loss
    count = sum(row.weight * (len(row.tokens) if mode == "token-mean" else 1) for row in rows)
    return total / count


def mean_loss(algorithm: ARPPO, stage: Any, track: RolloutTrack, now: TrainingProgress = NOW) -> Tensor:
    return algorithm.loss(stage, track, (0,), in_step(algorithm, track, now)).loss / algorithm.count(track)


@EVERY_OPTION
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_are_those_of_the_equations(options: dict[str, Any], seed: int) -> None:
    algorithm = ARPPO(**options)
    stage, track = judged(seed)
    have, want = mean_loss(algorithm, stage, track), expected_loss(algorithm, track, stage.logp, stage.value)
    assert have.item() == pytest.approx(want.item(), rel=1e-10)
    leaves = [stage.logp, stage.value]
    for a, b in zip(torch.autograd.grad(have, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert float(b.abs().max()) > 1e-3
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def table_with_head(seed: int) -> TableStage:
    """In float64, with a head that does not say zero."""
    stage = token_stage(seed)
    stage.table.double()
    stage.value_head = stage.build_value_head(width=7, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    stage.value_head.output_layer.weight.data = 0.5 * torch.randn(1, 7, generator=generator, dtype=torch.float64)
    return stage


def by_hand(stage: TableStage, track: RolloutTrack, through: bool) -> tuple[Tensor, Tensor]:
    """[sum L] log-probs and values, token by token."""
    table, head, logps, state_values = stage.table.table, stage.value_head, [], []
    assert isinstance(head, TokenValueHead)
    for b, (start, stop) in enumerate(itertools.pairwise(track.segment.offsets.tolist())):
        prompt, previous = int(track.conditions["prompt"].number[b]), 5
        for t in range(start, stop):
            line, token = table[prompt, previous], int(track.segment.tokens[t])
            logps.append((line / track.segment.temperature).log_softmax(0)[token])
            state = torch.zeros(24, dtype=torch.float64)
            state[prompt * 6 + previous] = 1.0
            h = torch.cat([state, line if through else line.detach()])
            h = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
            h = F.silu(head.hidden.weight @ h + head.hidden.bias)
            state_values.append((head.output_layer.weight @ h + head.output_layer.bias)[0])
            previous = token
    return torch.stack(logps), torch.stack(state_values)


@pytest.mark.parametrize("gradient", ["head", "policy"])
@EVERY_OPTION
def test_policy_and_head_get_the_gradients_of_the_equations(options: dict[str, Any], gradient: Any) -> None:
    """A table and its head trained on rows that another table sampled, with anchors of others still."""
    algorithm = ARPPO(**options, value_gradient=gradient)
    track = token_track(token_stage(seed=1), params=TokenSampling(temperature=0.7))
    track = prepared_track(algorithm, table_with_head(2), track)
    stage = table_with_head(0)
    parameters = [stage.table.table, *stage.value_head.parameters()]
    have = torch.autograd.grad(mean_loss(algorithm, stage, track), parameters)
    logp, state_values = by_hand(stage, track, through=gradient == "policy")
    want = torch.autograd.grad(expected_loss(algorithm, track, logp, state_values), parameters)
    for a, b in zip(have, want, strict=True):
        assert float((a - b).abs().max()) < 1e-5 * float(b.abs().max())


def test_only_a_value_gradient_through_the_policy_reaches_the_policy() -> None:
    track = token_track(token_stage(seed=1))
    track = track.replace(advantages=torch.zeros(len(track)), rewards=torch.zeros(len(track)))
    moved = {}
    for gradient in ("head", "policy"):
        stage = table_with_head(0)
        algorithm = ARPPO(value_gradient=gradient, lam=1.0, clip_range=0.2)  # type: ignore[arg-type]
        anchors = {
            "old_logp": -100 * torch.ones(len(track.segment.tokens)),
            "old_value": torch.zeros(len(track.segment.tokens)),
        }
        rows = track.replace(segment=track.segment.replace(anchors=anchors))  # all clipped and worth nothing
        mean_loss(algorithm, stage, rows).backward()
        moved[gradient] = float(stage.table.table.grad.abs().max())
        assert float(stage.value_head.output_layer.weight.grad.abs().max()) > 1e-3
    assert moved["head"] == 0.0 and moved["policy"] > 1e-3


# Credit on packed rows


def credit_of(algorithm: ARPPO, track: RolloutTrack, now: TrainingProgress = NOW) -> tuple[StepCredit, Tensor]:
    """Advantages and returns of the packed tokens, and the mask of counted tokens."""
    tokens = algorithm.tokens(track.segment.logp, track, (0,))
    old = tokens.rows.masked(track.segment.anchors["old_value"])
    return algorithm.gae_credit(tokens, old, track, (0,), now), tokens.rows.token_mask


def alone(
    algorithm: ARPPO, track: RolloutTrack, now: TrainingProgress = NOW
) -> list[tuple[list[int], list[float], list[float]]]:
    """Tokens, rewards and old values of each row of positive weight."""
    rows = [row.tokens for row in rows_of(replace(algorithm, whiten=False), track, now)]
    old = track.segment.anchors["old_value"]
    return [
        (tokens, rewards_of(algorithm, track, b, tokens, now), [float(old[t]) for t in tokens])
        for b, tokens in enumerate(rows)
        if tokens
    ]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("kl_penalty", [{}, KL_IN_REWARD], ids=["no kl_penalty", "kl in reward"])
def test_lambda_one_is_the_monte_carlo_return_minus_the_value(gamma: float, kl_penalty: dict[str, Any]) -> None:
    algorithm = ARPPO(gamma=gamma, lam=1.0, outcome="rewards", **kl_penalty)
    _, track = judged(0)
    credit, counts = credit_of(algorithm, track)
    for tokens, rewards, old in alone(algorithm, track):
        returns = [sum(gamma**k * r for k, r in enumerate(rewards[i:])) for i in range(len(rewards))]
        assert credit.returns[tokens].tolist() == pytest.approx(returns, rel=1e-12, abs=1e-12)
        less = [r - v for r, v in zip(returns, old, strict=True)]
        assert credit.advantages[tokens].tolist() == pytest.approx(less, rel=1e-12, abs=1e-12)
    assert not credit.advantages[~counts].any() and not credit.returns[~counts].any()


def test_lambda_zero_is_the_temporal_difference_error() -> None:
    algorithm = ARPPO(gamma=0.9, lam=0.0, outcome="rewards", **KL_IN_REWARD)
    _, track = judged(1)
    credit, _ = credit_of(algorithm, track)
    for tokens, rewards, old in alone(algorithm, track):
        following = [*old[1:], 0.0]
        errors = [r + 0.9 * v_next - v for r, v, v_next in zip(rewards, old, following, strict=True)]
        assert credit.advantages[tokens].tolist() == pytest.approx(errors, rel=1e-12, abs=1e-12)


def test_a_truncated_response_bootstraps_from_the_value_of_its_last_state() -> None:
    """Its last token is where V is read: those before it are credited as if the episode went on from there."""
    algorithm = ARPPO(gamma=0.9, lam=0.7, outcome="rewards", bootstrap_truncated=True)
    _, track = judged(1)
    finished = torch.arange(len(track)) % 2 == 1
    cut = track.replace(segment=track.segment.replace(finished=finished))
    credit, counts = credit_of(algorithm, cut)
    plain, _ = credit_of(replace(algorithm, bootstrap_truncated=False), cut)
    seen = 0
    for tokens, rewards, old in alone(algorithm, track):
        row = int((track.segment.offsets <= tokens[0]).sum()) - 1
        if finished[row]:
            assert torch.equal(credit.advantages[tokens], plain.advantages[tokens])
            continue
        seen += len(tokens) > 2
        want, following = 0.0, old[-1]
        for i in range(len(tokens) - 2, -1, -1):
            earned = rewards[-1] if i == len(tokens) - 2 else 0.0
            want = earned + 0.9 * following - old[i] + 0.9 * 0.7 * want
            following = old[i]
            assert float(credit.advantages[tokens[i]]) == pytest.approx(want, rel=1e-12, abs=1e-12)
            assert float(credit.returns[tokens[i]]) == pytest.approx(want + old[i], rel=1e-12, abs=1e-12)
        assert float(credit.advantages[tokens[-1]]) == 0.0 and float(credit.returns[tokens[-1]]) == old[-1]
    assert seen >= 2 and not credit.advantages[~counts].any()


def test_without_discount_and_kl_the_advantage_is_the_outcome_minus_each_value() -> None:
    algorithm = ARPPO(lam=1.0, outcome="rewards")
    _, track = judged(2)
    credit, counts = credit_of(algorithm, track)
    per_token = track.rewards.repeat_interleave(track.segment.lengths)
    assert torch.allclose(credit.advantages, torch.where(counts, per_token - track.segment.anchors["old_value"], 0.0))
    assert torch.allclose(credit.returns, torch.where(counts, per_token, 0.0))


@pytest.mark.parametrize("options", [{}, {"gamma": 0.9, "lam": 0.6} | KL_IN_REWARD], ids=["default", "kl in reward"])
def test_packed_and_padded_rows_have_equal_advantages(options: dict[str, Any]) -> None:
    """The recursion over the columns of a padded batch, which carries its state across tokens that do not count."""
    algorithm = ARPPO(**options)
    _, track = judged(3)
    credit, counts = credit_of(algorithm, track)
    lengths = track.segment.lengths.tolist()

    def padded(column: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence(list(column.split(lengths)), batch_first=True)

    mask, old = padded(counts), padded(track.segment.anchors["old_value"])
    anchors, beta = track.segment.anchors, algorithm.kl_coef * NOW.kl_scale
    kl_penalty = padded(beta * (anchors["old_logp"] - anchors["ref_logp"]))
    advantages, zero = torch.zeros_like(old), torch.zeros(len(track), dtype=torch.float64)
    carried, following, earned = zero, zero, track.advantages
    for t in reversed(range(old.shape[1])):
        real = mask[:, t]
        here = (
            earned
            - kl_penalty[:, t]
            + algorithm.gamma * following
            - old[:, t]
            + algorithm.gamma * algorithm.lam * carried
        )
        carried, following = torch.where(real, here, carried), torch.where(real, old[:, t], following)
        earned = torch.where(real, 0.0, earned)
        advantages[:, t] = torch.where(real, here, 0.0)
    for have, want, length in zip(credit.advantages.split(lengths), advantages, lengths, strict=True):
        assert torch.allclose(have, want[:length], rtol=1e-12, atol=1e-12)


@EVERY_OPTION
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_values_at_uncounted_tokens_and_rows_have_no_effect(options: dict[str, Any], poison: float) -> None:
    algorithm = ARPPO(**options, mismatch=SequenceTIS(cap=1.05), entropy_coef=0.1)
    stage, track = judged(2)
    dead = torch.zeros(len(track), dtype=torch.bool)
    dead[DROPPED] = True
    gone = ~track.segment.loss_mask | dead.repeat_interleave(track.segment.lengths)

    def spoilt(column: Tensor) -> Tensor:
        return column.detach().masked_fill(gone, poison)

    anchors = {name: spoilt(column) for name, column in track.segment.anchors.items()}
    ill = track.replace(
        segment=track.segment.replace(logp=spoilt(track.segment.logp), anchors=anchors),
        advantages=track.advantages.masked_fill(dead, poison),
        rewards=track.rewards.masked_fill(dead, poison),
    )
    ill_stage = LeafStage(spoilt(stage.logp), spoilt(stage.entropy), spoilt(stage.value))
    results = []
    for policy, rows in ((stage, track), (ill_stage, ill)):
        result = algorithm.loss(policy, rows, (0,), in_step(algorithm, rows))
        gradients = torch.autograd.grad(result.loss, [policy.logp, policy.entropy, policy.value])
        results.append((result.loss.detach(), gradients, values(result.metrics)))
    (loss, gradients, metrics), (ill_loss, ill_gradients, ill_metrics) = results
    assert torch.equal(loss, ill_loss) and metrics == ill_metrics
    assert all(torch.equal(a, b) for a, b in zip(gradients, ill_gradients, strict=True))
    tokens, replay = algorithm.tokens(ill_stage.logp.detach(), ill, (0,)), algorithm.replay(ill_stage, ill)
    seen = algorithm.assign_credit(tokens, replay, ill, (0,), in_step(algorithm, ill))
    columns = (seen.advantages, seen.critic.values, seen.critic.old, seen.critic.returns)
    assert not any(bool(column[~tokens.rows.token_mask].any()) for column in columns)


# The value loss


def one_token(value: float, old: float, reward: float) -> tuple[LeafStage, RolloutTrack]:
    stage, track = judged(0, (1,))
    stage.value.data.fill_(value)
    anchors = {"old_logp": stage.logp.detach(), "old_value": torch.full_like(stage.value, old).detach()}
    segment = track.segment.replace(anchors=anchors, loss_mask=torch.ones(1, dtype=torch.bool))
    return stage, track.replace(segment=segment, rewards=torch.tensor([reward], dtype=torch.float64))


def test_the_value_loss_has_its_published_value() -> None:
    stage, track = one_token(value=2.0, old=1.0, reward=0.0)
    algorithm = ARPPO(outcome="rewards", value_clip=0.2, vf_coef=0.5)
    result = algorithm.loss(stage, track, (0,))
    metrics = values(result.metrics)
    assert metrics["train/value_loss"] == pytest.approx(2.0, rel=1e-12)  # max(4, 1.44) / 2
    assert metrics["train/value_clip_fraction"] == 1.0
    linear = replace(algorithm, value_huber=0.5).loss(stage, track, (0,))
    assert values(linear.metrics)["train/value_loss"] == pytest.approx(0.875)  # 0.5 (2 - 0.25)
    (slope,) = torch.autograd.grad(result.loss / algorithm.count(track), stage.value)
    assert slope.tolist() == pytest.approx([0.5 * 2.0], rel=1e-12)


def test_a_clipped_value_has_no_gradient_until_the_next_step() -> None:
    stage, track = one_token(value=1.5, old=1.0, reward=2.0)
    (clipped,) = torch.autograd.grad(mean_loss(ARPPO(outcome="rewards"), stage, track), stage.value)
    (free,) = torch.autograd.grad(mean_loss(ARPPO(outcome="rewards", value_clip=None), stage, track), stage.value)
    assert clipped.item() == 0.0 and free.item() == pytest.approx(0.5 * -0.5, rel=1e-12)


def test_metrics_use_counted_tokens_only() -> None:
    algorithm = ARPPO(outcome="rewards", value_clip=0.2)
    stage, track = judged(4)
    metrics = values(algorithm.loss(stage, track, (0,)).metrics)
    check_names(metrics)
    rows = rows_of(algorithm, track, TrainingProgress())
    tokens = [t for row in rows for t in row.tokens]
    weight = torch.tensor([row.weight for row in rows for _ in row.tokens], dtype=torch.float64)
    target = torch.tensor([r for row in rows for r in row.returns], dtype=torch.float64)
    v, old = stage.value.detach()[tokens], track.segment.anchors["old_value"][tokens]
    share = weight / weight.sum()

    def spread(x: Tensor) -> float:
        return math.sqrt(float((share * (x - (share * x).sum()).square()).sum()))

    assert metrics["train/value_error_std"] == pytest.approx(spread(target - v), rel=1e-6)
    assert metrics["train/return_std"] == pytest.approx(spread(target), rel=1e-6)
    moved = ((v - old).abs() > 0.2).double()
    assert 0.05 < metrics["train/value_clip_fraction"] < 0.95
    assert metrics["train/value_clip_fraction"] == pytest.approx(float((share * moved).sum()), rel=1e-6)
    assert metrics["train/critic_loss"] == pytest.approx(0.5 * metrics["train/value_loss"], rel=1e-6)


# The contract of losses


@EVERY_OPTION
@pytest.mark.parametrize("more", [{}, {"old_logp_source": "rollout"}], ids=["replay", "rollout"])
@pytest.mark.parametrize("gradient", ["head", "policy"])
def test_it_keeps_the_contract_of_losses(options: dict[str, Any], more: dict[str, Any], gradient: Any) -> None:
    stage = token_stage()
    stage.value_head = TokenValueHead.of(29, 7, seed=0)
    stage.value_head.output_layer.weight.data.fill_(0.3)
    track = token_track(token_stage(seed=1), params=TokenSampling(temperature=0.7))
    check_algorithm(ARPPO(**options, **more, value_gradient=gradient), stage, track)


@EVERY_OPTION
@pytest.mark.parametrize("cut", [[1] * 7, [3, 4], [6, 1]], ids=str)
def test_every_division_into_micro_batches_gives_the_same_loss(options: dict[str, Any], cut: list[int]) -> None:
    algorithm = ARPPO(**options)
    stage, track = judged(1)
    now, bounds = in_step(algorithm, track), [0, *itertools.accumulate(cut)]
    results = [algorithm.loss(stage, track.slice(a, b), (0,), now) for a, b in itertools.pairwise(bounds)]
    whole = algorithm.loss(stage, track, (0,), now)
    leaves = [stage.logp, stage.value]
    apart = torch.autograd.grad(sum(r.loss for r in results), leaves)
    for a, b in zip(apart, torch.autograd.grad(whole.loss, leaves), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert values(merge(r.metrics for r in results)) == pytest.approx(values(whole.metrics), rel=1e-6, abs=1e-9)


@EVERY_OPTION
def test_the_loss_neither_syncs_with_its_device_nor_mixes_devices(options: dict[str, Any]) -> None:
    algorithm = ARPPO(**options)
    stage, track = judged(0)
    far = LeafStage(*(leaf.detach().to("meta") for leaf in (stage.logp, stage.entropy, stage.value)))
    result = algorithm.loss(far, track.to("meta"), (0,), in_step(algorithm, track))
    result.loss.backward()
    assert far.logp.grad is not None and far.value.grad is not None


@EVERY_OPTION
def test_nothing_to_train_is_a_loss_of_zero(options: dict[str, Any]) -> None:
    algorithm = ARPPO(**options)
    stage, track = judged(0, (0, 0))
    result = algorithm.loss(stage, track, (0,), in_step(algorithm, track))
    assert float(result.loss.detach()) == 0.0
    assert all(math.isfinite(number) for number in values(result.metrics).values())


def test_needs_and_anchors() -> None:
    algorithm, live = ARPPO(), {"old_logp": Anchor("live", "logp"), "old_value": Anchor("live", "value")}
    assert algorithm.needs.value and algorithm.needs.multi_update and not algorithm.needs.totals
    assert algorithm.anchors() == live and ARPPO(whiten=True).needs.totals
    recorded = ARPPO(old_logp_source="rollout", kl_coef=0.1)
    assert recorded.anchors() == {"ref_logp": Anchor("reference", "logp"), "old_value": Anchor("live", "value")}
    assert recorded.needs.snapshots == ("reference",) and recorded.needs.behaviour_logp
    assert not ARGRPO().needs.value


@pytest.mark.parametrize(
    "options",
    [
        {"lam": -0.1},
        {"lam": 1.5},
        {"gamma": 1.1},
        {"gamma": math.nan},
        {"vf_coef": 0.0},
        {"vf_coef": math.nan},
        {"value_clip": 0.0},
        {"clip_range": 0.0},
        {"kl_in": "reward", "kl_coef": 0.1},
        {"horizon": 8},
    ],
)
def test_settings_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{next(iter(options))}"):
        ARPPO(**options)


def test_a_recipe_block_makes_the_loss() -> None:
    block = {
        "_target_": "unirl.algorithms.ar_ppo.ARPPO",
        "loss_agg_mode": "seq-mean-token-mean",
        "outcome": "rewards",
        "value_gradient": "policy",
        "whiten": True,
        "value_clip": None,
        "lam": 1,
    }
    made = ARPPO(
        loss_agg_mode="seq-mean-token-mean",
        outcome="rewards",
        value_gradient="policy",
        whiten=True,
        value_clip=None,
        lam=1.0,
    )
    assert build(check_node(block, path="algorithm")) == made
    with pytest.raises(ConfigError, match=r"algorithm\.value_gradient"):
        check_node(block | {"value_gradient": "trunk"}, path="algorithm")
