"""The distribution of one denoising step: sampled in rollout, evaluated in training, compared in divergences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def per_row(values: Float[Tensor, ""] | Float[Tensor, "B"], like: Float[Tensor, "B *latent"]) -> Float[Tensor, "..."]:
    """`values` ([] or [B]) shaped to broadcast over the latent dims of `like` [B, *latent]."""
    return values if values.dim() == 0 else values.reshape(-1, *[1] * (like.dim() - 1))


def row_means(values: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
    """[B] mean of each row of `values` [B, *latent], with bits that depend on the row alone.

    torch's own reduction splits its sums by the batch's size (across threads on a CPU, across blocks on a GPU).
    """
    means: Tensor = _RowMeans.apply(values)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return means


class _RowMeans(torch.autograd.Function):
    """Halves added to halves: elementwise sums, which no batch, thread or device can reorder."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # a bag of attributes
        ctx.shape = values.shape
        rows = values.reshape(len(values), -1)
        size = rows.shape[1]
        while (width := rows.shape[1]) > 1:
            half = width // 2
            folded = rows[:, :half] + rows[:, half : 2 * half]
            if width % 2:
                folded[:, 0] += rows[:, -1]
            rows = folded
        return rows[:, 0] / size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape: torch.Size = ctx.shape
        return (grad / math.prod(shape[1:])).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, std^2 I) over the next latents."""

    mean: Tensor  # [B, *latent]
    std: Tensor  # [] or [B], dtype and device of `mean`
    dense: bool = False
    """Every std is known to be positive, so `log_prob` need not read them back from the device to find out."""

    def sample(self, noise: Float[Tensor, "B *latent"]) -> Float[Tensor, "B *latent"]:
        """[B, *latent] mean + std * noise."""
        return self.mean + per_row(self.std, self.mean) * noise.to(self.mean)

    def log_prob(self, x_next: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
        """[B] nats, mean over latent elements; `x_next` [B, *latent] is detached. Flow-GRPO, arXiv:2505.05470."""
        z = self._error(x_next) / per_row(self.std, self.mean)
        return -0.5 * row_means(z.square()) - self._log_std() - HALF_LOG_TWO_PI

    def kl(self, other: Gaussian) -> Float[Tensor, "B"]:
        """[B] KL(self || other), nats, mean over latent elements.

        KL = (mean - mean')^2 / (2 std'^2) + (std^2 / std'^2 - 1) / 2 - log(std / std')
        """
        self.require_density("kl")
        other.require_density("kl")
        drift = (self.mean - other.mean) / per_row(other.std, other.mean)
        ratio = self.std.double() / other.std.double()
        # The std terms cancel at equal std: in float32 their rounding would swamp a KL of 1e-7.
        spread = 0.5 * (ratio.square() - 1.0) - ratio.log()
        return 0.5 * row_means(drift.square()) + spread.to(drift.dtype)

    def require_density(self, what: str) -> None:
        """Raises ValueError unless every std is positive: a step without noise has no log-probability."""
        if not self.dense and not bool((self.std > 0).all()):
            raise ValueError(
                f"Gaussian.{what} of a step with std={self.std.min().item():g}: a step without noise has no density "
                "(deterministic kernels, eta < 1e-7, the last step). Ask kernel.has_density(step, num_steps) first"
            )

    def _error(self, x_next: Tensor) -> Tensor:
        """[B, *latent] x_next - mean."""
        self.require_density("log_prob")
        if x_next.shape != self.mean.shape:
            raise ValueError(f"x_next {tuple(x_next.shape)} must have the mean's shape {tuple(self.mean.shape)}")
        return x_next.detach().to(self.mean) - self.mean

    def _log_std(self) -> Tensor:
        # Rounded from float64, so that one value and a batch of them give the same bits.
        return self.std.double().log().to(self.std.dtype)


@dataclass(frozen=True, eq=False)
class UnnormalisedGaussian(Gaussian):
    """A Gaussian whose log-prob drops the normaliser and the 1 / (2 std^2): CPS as published, arXiv:2509.05952."""

    def log_prob(self, x_next: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
        """[B] -(x_next - mean)^2, mean over latent elements; `x_next` [B, *latent] is detached."""
        return -row_means(self._error(x_next).square())
