"""Reward-weighted regression: the pre-training loss on the policy's own samples, weighted by their rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from unirl.algorithms.base import LatentRows, Part
from unirl.algorithms.shared.checks import check_positive
from unirl.algorithms.shared.forward_process import Noised, PenalizedLoss, mask_rows, mean_square
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.config.errors import IncompatibleError
from unirl.types.protocols import Needs
from unirl.types.results import Metrics

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class DiffusionRWR(PenalizedLoss):
    """L = mean over rows and times of  w e(v) + velocity_coef |v - v_ref|^2,   e(v) = mean (v - u)^2.

    Reward-weighted regression (Peters & Schaal 2007). u = eps - x0 is the target velocity. weighting=exponential: w =
    min(exp(A / temperature), max_weight), as in AWR (arXiv:1910.00177). reward: w = the reward, which must not be
    negative (arXiv:2302.12192). advantage: w = A, for estimators that give weights; with `BestOfGroup` this is
    supervised fine-tuning on the best sample of each group.
    """

    weighting: Literal["exponential", "reward", "advantage"] = "exponential"
    """Weight w of a sample: exp(A / temperature), its reward, or its advantage."""
    temperature: float = 1.0
    """Temperature of weighting=exponential. A small value concentrates the weight on the best samples."""
    max_weight: float = 20.0
    """Upper bound of w for weighting=exponential."""
    velocity_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(temperature=self.temperature, max_weight=self.max_weight)

    @property
    def needs(self) -> Needs:
        # exp(A / temperature) and rewards are positive weights, so a group of equal rewards is trained, too.
        return replace(super().needs, own_samples=False, advantages=self.weighting == "advantage")

    def count(self, rows: LatentRows) -> float:
        """The number of elements. Raises IncompatibleError for a negative weight, for which the loss has no minimum."""
        # This is called once per micro-batch while the rows are still on the CPU, so the check needs no device sync.
        w = self._sample_weights(rows, (0,))[:, 0]
        bad = ((w < 0) & (rows.weight > 0)).nonzero().flatten().tolist()
        if bad:
            raise IncompatibleError(
                f"algorithm.weighting={self.weighting} weighs a sample by its {self.weighting}, and that of "
                f"{rows.sample_ids[bad[0]]!r} is {float(w[bad[0]]):g}: regression away from a sample has no "
                "optimum. Use weighting=exponential, or DiffusionAWM, which takes advantages of both signs"
            )
        return super().count(rows)

    def policy_loss(
        self, noised: Noised, v: Float[Tensor, "B n *latent"], rows: LatentRows, part: Part
    ) -> tuple[Float[Tensor, "B n"], Metrics]:
        weights, sample_weights = self.weights(rows, part), self._sample_weights(rows, part)
        error = mean_square(v, noised.target)
        return sample_weights * error, {
            "train/matching_error": mean_metric(error, weights),
            "train/sample_weight": mean_metric(sample_weights, weights),
        }

    def _sample_weights(self, rows: LatentRows, part: Part) -> Tensor:
        """[B, n] float64 weight w of every element."""
        if self.weighting == "reward":
            assert rows.rewards is not None, "training needs rewards: score_and_attach comes before train_track"
            return mask_rows(rows, rows.rewards.double())[:, None].expand(-1, len(part))
        advantages = self.element_advantages(rows, part).double()
        if self.weighting == "advantage":
            return advantages
        return (advantages / self.temperature).exp().clamp(max=self.max_weight)
