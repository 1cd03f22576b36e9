"""DRPO and SPO: a quadratic penalty on the importance ratio replaces the clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl.algorithms.shared.surrogate import quadratic_penalty_loss
from unirl.algorithms.shared.tokens import Surrogate, TokenLoss, Tokens
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class DRPO(TokenLoss):
    """P = -A r + |A| mu (r - 1)^2 / (2 epsilon),  mu = sg[pi_old], r = pi_theta / mu per token.

    DRPO (arXiv:2606.09821). r is the importance ratio, A the advantage, sg[] detaches. The gradient is -A r (1 -
    sign(A (r - 1)) |pi_theta - mu| / epsilon): a trust region of width epsilon in probability and epsilon / mu in the
    ratio. Without mu in the penalty it is SPO (arXiv:2401.16025). `loss` is `TokenLoss.loss`.
    """

    drpo_epsilon: float = 12.5
    """Width of the trust region in |pi_theta - pi_old|, or for SPO in |r - 1| (0.2 is usual for SPO)."""
    penalty_mu_weighted: bool = True
    """Weigh the penalty by mu; false = SPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drpo_epsilon > 0.0:
            raise InvalidValueError(
                f"algorithm.drpo_epsilon must be > 0, got {self.drpo_epsilon}; 12.5 is usual, 0.2 for SPO"
            )

    def surrogate(self, tokens: Tokens, now: TrainingProgress) -> Surrogate:
        mu = tokens.old_logp.exp() if self.penalty_mu_weighted else torch.ones_like(tokens.old_logp)
        losses = quadratic_penalty_loss(tokens.log_ratio, tokens.advantages, mu / (2.0 * self.drpo_epsilon))
        beyond = mu * tokens.log_ratio.detach().expm1() / self.drpo_epsilon
        return Surrogate(losses, tokens.log_ratio, beyond > 1.0, beyond < -1.0)
