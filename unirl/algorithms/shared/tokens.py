"""Base class of losses over packed elements: anchors, aggregation, KL to the reference, entropy, engine mismatch.

An element is a token, or a decision in an environment. A loss adds `surrogate`, one function of packed log-ratios.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LOSS_RMS, START, LossResult, Part, PolicyGradient, PolicyOutputs, TokenRows
from unirl.algorithms.shared.checks import check_coefficients, check_key
from unirl.algorithms.shared.contract import broken, check_elements, check_metrics, shown
from unirl.algorithms.shared.kl import MAX_LOG_RATIO, KLEstimator, k3, kl_estimate
from unirl.algorithms.shared.mismatch import Correction, check_source, mismatch_metrics
from unirl.algorithms.shared.packed import (
    NORMED,
    Aggregation,
    RowOffsets,
    row_of,
    token_count,
    token_shares,
    with_zero_appended,
)
from unirl.algorithms.shared.surrogate import clip_fractions, mean_metric, spread_metrics
from unirl.config.errors import InvalidValueError
from unirl.models.language.stage import AnyTokenStage, TokenReplay
from unirl.types.device import to_device
from unirl.types.protocols import REFERENCE, Anchor, Needs, TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import PackedSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class TokenValues:
    """Values of the state before each token, for a loss with a critic; 0 at tokens that are not counted."""

    values: Tensor  # [sum L] with graph
    old: Tensor  # [sum L] from before the first update
    returns: Tensor  # [sum L] the targets of the value head


@dataclass(frozen=True)
class Tokens:
    """The packed tokens that `surrogate` reads. All values are 0 at tokens that are not counted."""

    logp: Tensor  # [sum L] log pi_theta, nats, with graph
    old_logp: Tensor  # [sum L]
    log_ratio: Tensor  # [sum L] log importance ratio: logp - old_logp within +-20, with graph
    advantages: Tensor  # [sum L]
    weights: Tensor  # [sum L] weight of each token's row
    rows: RowOffsets
    critic: TokenValues | None = None
    part_ratios: Tensor | None = None
    """[sum L, U] log importance ratios of the parts of each element, with graph. None: an element has one ratio."""


@dataclass(frozen=True)
class Surrogate:
    """The policy loss of each token."""

    losses: Tensor  # [sum L] not yet weighted
    log_ratio: Tensor  # [sum L] log of the ratio that the loss uses
    above: Tensor  # [sum L] bool, the ratio is above the trust region
    below: Tensor  # [sum L] bool, the ratio is below it
    metrics: Metrics = field(default_factory=dict)
    """Metrics that only this loss logs."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Further loss terms [sum L] by metric name. The mismatch correction does not apply to them."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss(PolicyGradient[AnyTokenStage, PackedSegment]):
    """L = agg( c P + beta KL(pi_theta || reference) - eta H(pi_theta) ) over tokens.

    P is the policy loss of a subclass (its `surrogate`), c the mismatch weight of an engine with other numerics, agg
    the aggregation. A token with loss_mask False is context: neither its values nor a gradient from it reach the loss.
    A term with coefficient 0 is neither computed nor anchored.
    """

    loss_agg_mode: Aggregation = "token-mean"
    """A mean over all tokens, or over sequences after a mean, a sum, or a sum / horizon over their tokens."""
    horizon: int | None = None
    """H of seq-mean-token-sum-norm: the length of the longest response (Dr.GRPO)."""
    mismatch: Correction | None = None
    """Weights pi_old / pi_engine for an engine with other numerics or weights of earlier steps. Needs
    old_logp_source=replay; null = none."""
    kl_estimator: KLEstimator = "k3"
    """k2, k3 or k3+ in the loss; k1 in the reward."""
    entropy_coef: float = 0.0
    """eta, the factor of the entropy over the vocabulary per token, nats; 0 = no entropy bonus."""
    mask_truncated: bool = False
    """Ignore responses that reached the length limit (DAPO's overlong filtering, arXiv:2503.14476, 3.4)."""

    trains_tokens: ClassVar[bool] = True
    sampled_by: ClassVar[type] = ARSamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficients(entropy_coef=self.entropy_coef)
        self._check_kl_estimator()
        check_source(self.mismatch, self.old_logp_source)
        if (self.loss_agg_mode == NORMED) != (self.horizon is not None):
            raise InvalidValueError(
                f"algorithm.loss_agg_mode={self.loss_agg_mode} with algorithm.horizon={self.horizon}: a horizon "
                f"belongs to {NORMED}, which needs one; sampling.max_new_tokens is usual"
            )
        check_key(self.horizon is None or self.horizon >= 1, "algorithm.horizon", "be >= 1", self.horizon)

    def _check_kl_estimator(self) -> None:
        if self.kl_coef == 0.0:
            return
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise InvalidValueError(
                "algorithm.kl_estimator=k1 has no effect in a loss: the mean of its gradient is 0. "
                "Use k2, k3 or k3+, or algorithm.kl_in=reward"
            )
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            raise InvalidValueError(
                f"algorithm.kl_in=reward subtracts the log-ratio to the reference itself, so algorithm.kl_estimator "
                f"must be k1, got {self.kl_estimator}"
            )

    @abstractmethod
    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        """The policy loss per token: a pure function of the tokens and the recipe."""

    # Needs and anchors

    @property
    def needs(self) -> Needs:
        reads_engine = self.old_logp_source == "rollout" or self.mismatch is not None
        return replace(super().needs, behaviour_logp=reads_engine)

    def anchors(self) -> Mapping[str, Anchor]:
        old = {"old_logp": Anchor("live", "logp")} if self.old_logp_source == "replay" else {}
        return old | ({"ref_logp": Anchor(REFERENCE, "logp")} if self.kl_coef > 0.0 else {})

    # The contract of StageAlgorithm

    def parts(self, segment: PackedSegment) -> list[Part]:
        return [(0,)]  # one part: all tokens at once

    def count(self, rows: TokenRows) -> float:
        return float(token_count(self.loss_agg_mode, self.row_offsets(rows), rows.weight))

    def anchor(self, rows: TokenRows, name: str, part: Part) -> Float[Tensor, "sum_L ..."] | None:
        """[sum L] an anchor. None before the anchor pass has filled it."""
        return rows.segment.anchors.get(name)

    def measure(self, stage: AnyTokenStage, rows: TokenRows, part: Part) -> PolicyOutputs:
        return self._outputs(self.replay(stage, rows))

    def loss(self, stage: AnyTokenStage, rows: TokenRows, part: Part, now: TrainingProgress = START) -> LossResult:
        """One forward over all tokens, then the sum of policy loss, KL, entropy and the terms of the subclass."""
        replay = self.replay(stage, rows, entropy=self.entropy_coef > 0.0)
        tokens = self.tokens(replay.logp, rows, part)
        terms, means = self._entropy(replay, tokens)
        metrics: Metrics = {}
        if self.kl_coef > 0.0:
            kl, beta = self.reference_kl(tokens, rows, part), self.kl_coef * now.kl_scale
            means["train/kl"], metrics["train/kl_coef"] = kl, Metric.mean(beta)
            if self.kl_in == "loss":
                terms["train/kl_loss"] = beta * kl
        tokens = self.assign_credit(tokens, replay, rows, part, now)
        surrogate = self.surrogate(tokens, now)
        self._check_surrogate(surrogate, tokens)
        terms["train/policy_loss"], mismatch = self._corrected(surrogate.losses, tokens, rows)
        metrics |= mismatch | surrogate_metrics(surrogate, means, tokens.weights)
        loss, term_metrics = self._aggregated(terms | surrogate.terms, tokens, rows)
        return LossResult(loss, metrics | term_metrics, self._outputs(replay), tokens.advantages.detach())

    def parity(self, rows: TokenRows, part: Part, outputs: PolicyOutputs) -> Metrics:
        offsets = self.row_offsets(rows)
        gap = offsets.masked(rows.segment.logp - outputs["logp"])
        return drift_metrics(gap, offsets.masked(offsets.spread(rows.weight)))

    # The terms of the loss

    def row_offsets(self, rows: TokenRows) -> RowOffsets:
        """The rows of all tokens and the counted tokens.

        Counted are tokens with loss_mask True of rows with weight > 0. With `mask_truncated`, tokens of truncated
        responses are not counted.
        """
        live = rows.weight > 0
        if self.mask_truncated:
            live = live & rows.segment.finished.to(live.device)
        return RowOffsets.of(rows.segment.offsets, rows.segment.loss_mask, live)

    def replay(self, stage: AnyTokenStage, rows: TokenRows, *, entropy: bool = False) -> TokenReplay:
        """The outputs of the stage's current weights at all tokens of `rows`."""
        return stage.replay(rows.conditions, rows.segment, entropy=entropy)

    @staticmethod
    def _outputs(replay: TokenReplay) -> PolicyOutputs:
        outputs: PolicyOutputs = {"logp": replay.logp.detach()}
        if replay.values is not None:
            outputs["value"] = replay.values.detach()
        if replay.parts is not None:
            outputs["parts"] = replay.parts.detach()
        return outputs

    def tokens(self, logp: Float[Tensor, "sum_L"], rows: TokenRows, part: Part) -> Tokens:
        """The inputs of `surrogate`, with the log of the importance ratio; zeros at tokens that are not counted."""
        offsets = self.row_offsets(rows)
        recorded = rows.segment.logp if self.old_logp_source == "rollout" else self.anchor(rows, "old_logp", part)
        old_logp = offsets.masked(logp.detach() if recorded is None else recorded)
        logp = offsets.masked(logp)
        advantages = self.token_advantages(rows, part, old_logp)
        check_elements(self, "token_advantages", advantages, logp.shape, has_graph=False)
        return Tokens(
            logp=logp,
            old_logp=old_logp,
            log_ratio=(logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            advantages=offsets.masked(advantages).detach(),
            weights=offsets.masked(offsets.spread(rows.weight)),
            rows=offsets,
        )

    def token_advantages(self, rows: TokenRows, part: Part, old_logp: Float[Tensor, "sum_L"]) -> Float[Tensor, "sum_L"]:
        """[sum L] the advantage of each token before a KL in the reward, here that of its row."""
        assert rows.advantages is not None, "training needs advantages: compute_advantages comes before train_track"
        return rows.advantages[to_device(row_of(rows.segment.offsets), rows.advantages.device)]

    def assign_credit(
        self, tokens: Tokens, replay: TokenReplay, rows: TokenRows, part: Part, now: TrainingProgress
    ) -> Tokens:
        """The tokens with their final advantages: here minus this and all later KL penalties, in `ARPPO` by GAE."""
        kl_penalty = self.kl_penalty(tokens, rows, part, now)
        if kl_penalty is None:
            return tokens
        to_go = tokens.rows.rest(kl_penalty.detach()).to(tokens.advantages.dtype)
        return replace(tokens, advantages=tokens.rows.masked(tokens.advantages - to_go))

    def kl_penalty(
        self, tokens: Tokens, rows: TokenRows, part: Part, now: TrainingProgress
    ) -> Float[Tensor, "sum_L"] | None:
        """[sum L] beta KL, to be subtracted from the reward of each token. None unless kl_in=reward."""
        if self.kl_coef == 0.0 or self.kl_in == "loss":
            return None
        return self.kl_coef * now.kl_scale * self.reference_kl(tokens, rows, part)

    def _entropy(self, replay: TokenReplay, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The entropy bonus and the logged entropy: exact if the loss uses it, else the estimate -log pi."""
        if self.entropy_coef == 0.0:
            return {}, {"train/entropy": -tokens.logp.detach()}
        assert replay.entropy is not None, "the stage was asked for the entropy and returned none"
        return {"train/entropy_loss": -self.entropy_coef * replay.entropy}, {"train/entropy": replay.entropy.detach()}

    def reference_kl(self, tokens: Tokens, rows: TokenRows, part: Part) -> Float[Tensor, "sum_L"]:
        """[sum L] KL to the reference, nats: of pi_theta with graph in the loss, of pi_old in the reward."""
        reference = self.filled_anchor(rows, "ref_logp", part)
        policy = tokens.logp if self.kl_in == "loss" else tokens.old_logp
        return kl_estimate(self.kl_estimator, policy - tokens.rows.masked(reference))

    def _check_surrogate(self, surrogate: Surrogate, tokens: Tokens) -> None:
        """Raises PluginError if `surrogate` returned something else than its contract says."""
        if not isinstance(surrogate, Surrogate):
            raise broken(
                self, "surrogate", shown(surrogate), "It must return a unirl.algorithms.shared.tokens.Surrogate"
            )
        shape, has_graph = tokens.logp.shape, tokens.logp.requires_grad
        for name, value in {
            "log_ratio": surrogate.log_ratio,
            "above": surrogate.above,
            "below": surrogate.below,
        }.items():
            check_elements(self, "surrogate", value, shape, has_graph=False, name=name)
        for name, value in {"losses": surrogate.losses, **surrogate.terms}.items():
            check_elements(self, "surrogate", value, shape, has_graph, name=name)
        check_metrics(self, "surrogate", surrogate.metrics)

    def _corrected(self, losses: Tensor, tokens: Tokens, rows: TokenRows) -> tuple[Tensor, Metrics]:
        """[sum L] the policy losses times the mismatch weights, if the recipe has a correction."""
        if self.mismatch is None:
            return losses, {}
        gap = tokens.old_logp - tokens.rows.masked(rows.segment.logp)
        corrected = self.mismatch(gap, tokens.rows)
        return corrected.weights * losses, mismatch_metrics(gap, corrected, tokens.weights)

    def _aggregated(self, terms: dict[str, Tensor], tokens: Tokens, rows: TokenRows) -> tuple[Tensor, Metrics]:
        """[] the sum of all terms, which the stack divides by `count`, and each term already divided as a metric."""
        shares = token_shares(self.loss_agg_mode, tokens.rows, rows.weight, self.horizon)
        count = token_count(self.loss_agg_mode, tokens.rows, rows.weight)
        stacked = torch.stack(list(terms.values()))
        sums = (shares * stacked).masked_fill(~(shares > 0), 0.0).sum(1)
        totals = zip(terms, sums.detach().unbind(), strict=True)
        metrics = {name: Metric(total, count, "mean") for name, total in totals}
        metrics[LOSS_RMS] = Metric.rms(stacked.detach().sum(0), shares)
        return sums.sum(), metrics


@torch.no_grad()
def surrogate_metrics(
    surrogate: Surrogate, means: Mapping[str, Float[Tensor, "sum_L"]], weights: Float[Tensor, "sum_L"]
) -> Metrics:
    """Distance of the policy from the one that sampled, and the weighted means of further values.

    Tokens of weight 0 are ignored.
    """
    log_ratio = surrogate.log_ratio.detach()
    smallest, largest = torch.aminmax(with_zero_appended(log_ratio))
    extremes = {"train/ratio_min": Metric.min(smallest.exp()), "train/ratio_max": Metric.max(largest.exp())}
    spread = spread_metrics(log_ratio, weights, {**clip_fractions(surrogate.above, surrogate.below), **means})
    return spread | extremes | surrogate.metrics


@torch.no_grad()
def drift_metrics(gap: Float[Tensor, "sum_L"], weights: Float[Tensor, "sum_L"]) -> Metrics:
    """Distance of the engine that sampled from the trainer's replay with the same weights.

    `gap` is log pi_engine - log pi_replay, nats; 0 at tokens that are not counted.
    """
    return {
        "rollout/parity_absdiff_max": Metric.max(with_zero_appended(gap.abs()).max()),
        "rollout/parity_absdiff_mean": mean_metric(gap.abs(), weights),
        "rollout/parity_kl": mean_metric(k3(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), weights),
    }
