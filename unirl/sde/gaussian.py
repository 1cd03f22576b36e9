"""The Gaussian of one denoising step. Rollouts sample it, training evaluates it, divergences compare two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unirl.types.device import to_device

if TYPE_CHECKING:
    from jaxtyping import Float

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def per_row(values: Float[Tensor, ""] | Float[Tensor, "B"], like: Float[Tensor, "B *latent"]) -> Float[Tensor, "..."]:
    """`values`, reshaped to broadcast over the latent dimensions of `like`."""
    return values if values.dim() == 0 else values.reshape(-1, *[1] * (like.dim() - 1))


def row_means(values: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
    """The mean of each row, with bits that depend on that row alone.

    The order of torch's own reduction depends on the batch size (threads on a CPU, blocks on a GPU).
    """
    means: Tensor = _RowMeans.apply(values)  # type: ignore[no-untyped-call]  # torch leaves it bare
    return means


class _RowMeans(torch.autograd.Function):
    """Adds the second half of each row to the first until one element is left: elementwise sums have a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # ctx may hold any attribute
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
    """True if every std is known to be positive. Then `log_prob` does not read them back from the device."""

    def sample(self, noise: Float[Tensor, "B *latent"]) -> Float[Tensor, "B *latent"]:
        """mean + std * noise."""
        return self.mean + per_row(self.std, self.mean) * to_device(noise, self.mean.device).to(self.mean.dtype)

    def log_prob(self, x_next: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
        """Log-density in nats, mean over latent elements; `x_next` is detached. Flow-GRPO, arXiv:2505.05470."""
        z = self._error(x_next) / per_row(self.std, self.mean)
        # Computed in float64 and rounded, so that a scalar std and a batch of them give the same bits.
        log_std = self.std.double().log().to(self.std.dtype)
        return -0.5 * row_means(z.square()) - log_std - HALF_LOG_TWO_PI

    def kl(self, other: Gaussian) -> Float[Tensor, "B"]:
        """KL(self || other) in nats, mean over latent elements.

        KL = (mean - mean')^2 / (2 std'^2) + (std^2 / std'^2 - 1) / 2 - log(std / std')
        """
        self.require_density("kl")
        other.require_density("kl")
        drift = (self.mean - other.mean) / per_row(other.std, other.mean)
        ratio = self.std.double() / other.std.double()
        # The std terms cancel at equal std. In float32, their rounding error would exceed a KL of 1e-7.
        spread = 0.5 * (ratio.square() - 1.0) - ratio.log()
        return 0.5 * row_means(drift.square()) + spread.to(drift.dtype)

    def require_density(self, what: str) -> None:
        """Raises ValueError unless every std is positive: a step without noise has no log-probability."""
        if not self.dense and not bool((self.std > 0).all()):
            raise ValueError(
                f"Gaussian.{what} of a step with std={self.std.min().item():g}: a step without noise has no density "
                "(deterministic kernels, eta < 1e-7, the last step). Check kernel.has_density(step, num_steps) first"
            )

    def _error(self, x_next: Tensor) -> Tensor:
        """[B, *latent] x_next - mean."""
        self.require_density("log_prob")
        if x_next.shape != self.mean.shape:
            raise ValueError(f"x_next {tuple(x_next.shape)} must have the mean's shape {tuple(self.mean.shape)}")
        return x_next.detach().to(self.mean) - self.mean


@dataclass(frozen=True, eq=False)
class UnnormalisedGaussian(Gaussian):
    """A Gaussian whose log-prob has neither the normaliser nor 1 / (2 std^2): CPS as published, arXiv:2509.05952."""

    def log_prob(self, x_next: Float[Tensor, "B *latent"]) -> Float[Tensor, "B"]:
        """-(x_next - mean)^2, mean over latent elements; `x_next` is detached."""
        return -row_means(self._error(x_next).square())
