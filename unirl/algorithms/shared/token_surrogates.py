"""What the losses over tokens weigh and bound: pure functions of packed log-probs and advantages.

pi = exp(logp) is the policy, mu = exp(old_logp) the one that sampled, r = pi / mu = exp(log_ratio), A the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.algorithms.shared.packed import PackedRows


def weighted_score(log_ratio: Tensor, logp: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-sg[clip(r, low, high)] A log pi per token: the weight is bounded and no token loses its gradient.

    CISPO, arXiv:2506.13585.
    """
    weight = log_ratio.detach().exp().clamp(low, high)
    return -weight * advantages * logp


def penalized_gain(log_ratio: Tensor, advantages: Tensor, penalty: Tensor | float) -> Tensor:
    """-A r + |A| penalty (r - 1)^2 per token: instead of a clip, a cost that turns the gradient where r has gone far.

    The gradient to log pi is -A r (1 - 2 penalty sign(A) (r - 1)).
    """
    return -advantages * log_ratio.exp() + advantages.abs() * penalty * log_ratio.expm1().square()


def soft_gate(log_ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)) per token; the slope in r is 1 at r = 1 and falls to 0 on both sides.

    tau = tau_pos where A > 0, else tau_neg. SAPO, arXiv:2511.20347.
    """
    tau = torch.where(advantages > 0, torch.full_like(log_ratio, tau_pos), tau_neg)
    return -advantages * (4.0 / tau) * torch.sigmoid(tau * log_ratio.expm1())


def sequence_log_ratio(log_ratio: Tensor, rows: PackedRows) -> Tensor:
    """Each token has the value mean_t log r_t of its row, and the gradient of its own log r_t (GSPO-token).

    Averaged over the row's tokens, a loss of it has value and gradient of the loss of the row's mean log-ratio; unlike
    that one it allows advantages that differ between tokens. Zheng et al. 2025, eq. 14 (arXiv:2507.18071).
    """
    mean = rows.spread(rows.mean(log_ratio.detach())).to(log_ratio.dtype)
    return mean + (log_ratio - log_ratio.detach())


def bounded_gain(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """log r per token, bounded on the side to which A pushes it: at most `high` if A > 0, at least -low if A < 0."""
    pushed_down = torch.where(advantages < 0, log_ratio.clamp(min=-low), 0.0)
    return torch.where(advantages > 0, log_ratio.clamp(max=high), pushed_down)


def moves_back(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """bool per token: A (r - 1) <= 0, the update moves pi back to mu (or r = 1, or A = 0)."""
    return advantages * log_ratio.detach() <= 0


def binary_tv(logp: Tensor, old_logp: Tensor) -> Tensor:
    """|pi - mu| per token: total variation between 'this token' and 'another' under both policies."""
    return (logp.detach().exp() - old_logp.exp()).abs()


def binary_kl(logp: Tensor, old_logp: Tensor) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) per token, nats: KL(mu || pi) between the same two events."""
    logp = logp.detach()
    other, old_other = -torch.expm1(logp), -torch.expm1(old_logp)  # 1 - pi, 1 - mu
    return old_logp.exp() * (old_logp - logp) + old_other * torch.log((old_other + 1e-8) / (other + 1e-8))


def within_prefix_budget(divergence: Tensor, rows: PackedRows, delta: float, w_min: float, delta_b: float) -> Tensor:
    """bool per token: Z_t <= min(delta, delta + b W_{<t} - Z_{<t}), so that no prefix drifts further than its budget.

    Z_t = w_t D_t with the position weights w_t = 1 - (1 - w_min) (t - 1) / (n - 1), W_{<t} and Z_{<t} the sums over
    earlier tokens, b = clip(90th percentile of D in the row, delta_b, 2 delta_b). CPPO, arXiv:2606.10968.

    Args:
        divergence: [sum L] D_t >= 0; positions and percentile see the tokens that count.
    """
    position = rows.before(torch.ones_like(divergence))
    last = rows.spread((rows.lengths - 1.0).clamp(min=1.0))
    weight = 1.0 - (1.0 - w_min) * position / last
    spent = weight * divergence.double()
    allowance = rows.spread(rows.quantile(divergence, 0.9).clamp(delta_b, 2.0 * delta_b))
    budget = delta + allowance * rows.before(weight) - rows.before(spent)
    return spent <= budget.clamp(max=delta)
