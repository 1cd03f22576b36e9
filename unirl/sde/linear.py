"""The linear form of every kernel, and the predictions of the clean sample and the noise.

Coefficients are computed per row in float64 on the host. The bits of a row therefore depend neither on the rest of the
batch nor on the type of sigma, a float or a [B] tensor. Keep sigmas on the CPU: reading them from a GPU synchronises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.sde.gaussian import Gaussian, per_row
from unirl.types.protocols import Previous

if TYPE_CHECKING:
    from jaxtyping import Float

MIN_ETA = 1e-7
"""With a smaller eta a kernel is deterministic: the Euler step, without a density."""


def working_pair(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"]
) -> tuple[Float[Tensor, "B *latent"], Float[Tensor, "B *latent"]]:
    """x and v in float64 if either is, else in float32: bfloat16 would round away the small drift of a step."""
    if x.shape != v.shape:
        raise ValueError(f"x {tuple(x.shape)} and v {tuple(v.shape)} must have the same shape [B, *latent]")
    dtype = torch.promote_types(torch.promote_types(x.dtype, v.dtype), torch.float32)
    return x.to(dtype), v.to(dtype)


def row_values(sigma: float | Float[Tensor, ""] | Float[Tensor, "B"], count: int) -> list[float]:
    """`count` noise levels as Python floats. A single one is repeated."""
    values: list[float] = torch.as_tensor(sigma, dtype=torch.float64).reshape(-1).tolist()
    if len(values) not in (1, count):
        raise ValueError(f"{len(values)} noise levels for {count} rows: pass one number, or one per row")
    return values if len(values) == count else values * count


def row_tensor(
    values: list[float], like: Float[Tensor, "..."], *, shared: bool
) -> Float[Tensor, ""] | Float[Tensor, "B"]:
    """`values` with the dtype and device of `like`: [] if `shared` by all rows, else [B]."""
    tensor = torch.tensor(values[0] if shared else values, dtype=like.dtype)
    return tensor.to(like.device, non_blocking=True)


def is_shared(*sigmas: float | Float[Tensor, "..."]) -> bool:
    """True if every noise level is one number for all rows."""
    return all(torch.as_tensor(sigma).dim() == 0 for sigma in sigmas)


def checked_steps(
    sigma: float | Float[Tensor, ""] | Float[Tensor, "B"],
    sigma_next: float | Float[Tensor, ""] | Float[Tensor, "B"],
    num_rows: int,
) -> list[tuple[float, float]]:
    """(sigma, sigma_next) per row, or one pair for all. Raises ValueError unless 1 >= sigma > sigma_next >= 0."""
    count = 1 if is_shared(sigma, sigma_next) else num_rows
    steps = list(zip(row_values(sigma, count), row_values(sigma_next, count), strict=True))
    for start, end in steps:
        if not 1.0 >= start > end >= 0.0:
            raise ValueError(
                f"a step from sigma={start:g} to sigma_next={end:g}: sigmas must decrease within [0, 1] "
                "(1 is noise, 0 is clean); pass adjacent entries of the schedule"
            )
    return steps


def predicted_x0(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"], sigma: float | Float[Tensor, ""] | Float[Tensor, "B"]
) -> Float[Tensor, "B *latent"]:
    """x - sigma v, the predicted clean sample."""
    return _along_v(x, v, sigma, offset=0.0)


def predicted_noise(
    x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"], sigma: float | Float[Tensor, ""] | Float[Tensor, "B"]
) -> Float[Tensor, "B *latent"]:
    """x + (1 - sigma) v, the predicted noise. The score is -noise / sigma."""
    return _along_v(x, v, sigma, offset=1.0)


def _along_v(x: Tensor, v: Tensor, sigma: float | Tensor, offset: float) -> Tensor:
    """x + (offset - sigma) v."""
    x, v = working_pair(x, v)
    shared = is_shared(sigma)
    weights = [offset - value for value in row_values(sigma, 1 if shared else len(x))]
    return x + per_row(row_tensor(weights, x, shared=shared), x) * v


class LinearKernel(ABC):
    """x_next ~ N((1 - sigma_next) x0 + c noise, std^2 I), for x0 = x - sigma v and noise = x + (1 - sigma) v.

    A subclass is a frozen dataclass that supplies (c, std).
    """

    multistep: ClassVar[bool] = False
    """True if `transition` reads `previous`."""
    preserves: ClassVar[str]
    """The property that holds for exact predictions, a word of the README; `unirl.testing.check_kernel` checks it."""

    @abstractmethod
    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form."""

    def has_density(self, step: int, num_steps: int) -> bool:
        """True if step `step` of `num_steps` is stochastic. The last step never is."""
        return False

    def transition(
        self,
        x: Float[Tensor, "B *latent"],
        v: Float[Tensor, "B *latent"],
        sigma: float | Float[Tensor, ""] | Float[Tensor, "B"],
        sigma_next: float | Float[Tensor, ""] | Float[Tensor, "B"],
        previous: Previous | None = None,
    ) -> Gaussian:
        """The distribution of x at `sigma_next`, given x and the velocity v at `sigma`.

        Args:
            sigma, sigma_next: one number for all rows, or [B].
            previous: the last deterministic step, for multistep kernels; None at the start and after a stochastic step.
        """
        x, v = working_pair(x, v)
        on_x, on_v, stds = [], [], []
        for start, end in checked_steps(sigma, sigma_next, len(x)):
            c, std = self.coefficients(start, end)
            excess = c - end  # 0 for Euler, whose mean is then exactly x + v dt
            on_x.append(1.0 + excess)
            on_v.append((end - start) + excess * (1.0 - start))
            stds.append(std)
        shared = is_shared(sigma, sigma_next)
        weight_x, weight_v, std_rows = (row_tensor(values, x, shared=shared) for values in (on_x, on_v, stds))
        mean = per_row(weight_x, x) * x + per_row(weight_v, x) * v
        return self.distribution(mean, std_rows, min(stds) > 0.0)

    def distribution(
        self, mean: Float[Tensor, "B *latent"], std: Float[Tensor, ""] | Float[Tensor, "B"], dense: bool
    ) -> Gaussian:
        """The Gaussian that `transition` returns. A kernel with another log-prob overrides this."""
        return Gaussian(mean, std, dense)


@dataclass(frozen=True, kw_only=True)
class NoisyKernel(LinearKernel):
    """A kernel that adds noise of strength eta. With eta = 0 it is the Euler step."""

    eta: float
    max_eta: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.eta <= self.max_eta or math.isinf(self.eta):
            raise ValueError(
                f"{type(self).__name__}.eta={self.eta} must be a finite number within [0, {self.max_eta:g}]; "
                "0 is the deterministic Euler step"
            )

    @abstractmethod
    def noisy_coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form for eta > 0."""

    def coefficients(self, sigma: float, sigma_next: float) -> tuple[float, float]:
        """(c, std) of the general form."""
        return (sigma_next, 0.0) if self.eta < MIN_ETA else self.noisy_coefficients(sigma, sigma_next)

    def has_density(self, step: int, num_steps: int) -> bool:
        """True if step `step` of `num_steps` is stochastic. The last step never is."""
        return self.eta >= MIN_ETA and 0 <= step < num_steps - 1


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of: {', '.join(choices)}")
