"""SAPO: a sigmoid of the importance ratio replaces the clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl.algorithms.shared.packed import Aggregation
from unirl.algorithms.shared.surrogate import soft_gate_loss
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class SAPO(TokenLoss):
    """P = -A (4 / tau) sigmoid(tau (r - 1)),  r = pi_theta / pi_old per token, tau = tau_pos where A > 0, else tau_neg.

    SAPO (arXiv:2511.20347). r is the importance ratio, A the advantage. The weight of a token's gradient is 1 at
    r = 1 and decreases on both sides, faster for negative advantages. There is no hard trust region, so the clip
    fractions are 0. `loss` is `TokenLoss.loss`.
    """

    loss_agg_mode: Aggregation = "seq-mean-token-mean"
    tau_pos: float = 1.0
    """Steepness of the sigmoid where A > 0."""
    tau_neg: float = 1.05
    """Steepness of the sigmoid where A <= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not value > 0.0:
                raise InvalidValueError(f"algorithm.{name} must be > 0, got {value}; 1 and 1.05 are usual")

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        losses = soft_gate_loss(tokens.log_ratio, tokens.advantages, self.tau_pos, self.tau_neg)
        no_token = torch.zeros_like(tokens.rows.token_mask)
        return Surrogate(losses, tokens.log_ratio, no_token, no_token)
