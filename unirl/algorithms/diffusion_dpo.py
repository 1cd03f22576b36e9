"""Diffusion-DPO: a preference loss on pairs of samples, compared with a reference policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unirl.algorithms.base import START, LatentRows, LossResult, Part, PolicyOutputs
from unirl.algorithms.shared.checks import check_key, check_positive
from unirl.algorithms.shared.forward_process import ForwardProcessLoss, mean_square
from unirl.algorithms.shared.surrogate import mean_metric, weighted_sum
from unirl.models.denoising.stage import DiffusionStage
from unirl.types.protocols import REFERENCE, Anchor, Needs, TrainingProgress

if TYPE_CHECKING:
    from jaxtyping import Float


def preference_margin(
    logp: Float[Tensor, "B n"], ref_logp: Float[Tensor, "B n"], beta: float
) -> Float[Tensor, "pairs n"]:
    """[B / 2, n] m = beta / 2 ((l_w - l_w^ref) - (l_l - l_l^ref)), the margin. Winners and losers alternate."""
    log_ratio = logp - ref_logp
    return 0.5 * beta * (log_ratio[0::2] - log_ratio[1::2])


@dataclass(frozen=True, kw_only=True)
class DiffusionDPO(ForwardProcessLoss):
    """L = mean over pairs and times of -log sigmoid(m),  m = beta / 2 ((l_w - l_w^ref) - (l_l - l_l^ref)).

        l = -e(v) = -mean over latent elements of (v - u)^2

    Diffusion-DPO (arXiv:2311.12908, eq. 14), with T omega included in beta. u = eps - x0 is the target velocity. Rows 2
    i and 2 i + 1 are the winner w and the loser l of a pair of one prompt; both use the winner's times and noise. An
    element of the loss is a pair at a training time.
    """

    beta: float = 100.0
    """Inverse temperature: 100 online on flows, 2000 to 5000 offline."""
    pairs_per_group: int = 1
    """Largest number of pairs per group: the best sample with the worst, the second best with the second worst, ..."""
    reference: Literal["reference", "old", "ema"] = REFERENCE
    """The reference policy: that at initialisation, or a snapshot that follows the trained one (backend.ema_*cfg)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(beta=self.beta)
        check_key(self.pairs_per_group >= 1, "algorithm.pairs_per_group", "be >= 1", self.pairs_per_group)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, rows_together=2, pairs=self.pairs_per_group, own_samples=False)

    def anchors(self) -> Mapping[str, Anchor]:
        return {"ref_logp": Anchor(self.reference, "logp")}

    def noise_ids(self, rows: LatentRows) -> Sequence[str]:
        winners = rows.sample_ids[0::2]
        return [winner for winner in winners for _ in range(2)]

    def count(self, rows: LatentRows) -> float:
        return float(self._pair_weights(rows).sum()) * sum(len(part) for part in self.parts(rows.segment))

    def measure(self, stage: DiffusionStage, rows: LatentRows, part: Part) -> PolicyOutputs:
        return {"logp": self._logp(stage, rows, part).detach()}

    def loss(self, stage: DiffusionStage, rows: LatentRows, part: Part, now: TrainingProgress = START) -> LossResult:
        logp = self._logp(stage, rows, part)
        outputs: PolicyOutputs = {"logp": logp.detach()}
        margin = preference_margin(logp, self.filled_anchor(rows, "ref_logp", part), self.beta)
        weights = self._pair_weights(rows)[:, None].expand_as(margin)
        metrics = {
            "train/preference_accuracy": mean_metric((margin > 0).double(), weights),
            "train/preference_margin": mean_metric(margin, weights),
            "train/matching_error": mean_metric(-outputs["logp"], self.weights(rows, part)),
        }
        return LossResult(weighted_sum(softplus(-margin), weights), metrics, outputs)

    def _logp(self, stage: DiffusionStage, rows: LatentRows, part: Part) -> Tensor:
        """[B, n] float64 surrogate log-prob l."""
        _check_pairs(rows)
        noised = self.noised(rows, part)
        return -mean_square(self.velocity(stage, rows, noised), noised.target)

    def _pair_weights(self, rows: LatentRows) -> Tensor:
        """[B / 2] the smaller weight of the two rows, so a pair with a row of weight 0 has weight 0."""
        return torch.minimum(rows.weight[0::2], rows.weight[1::2])


def _check_pairs(rows: LatentRows) -> None:
    """Raises ValueError unless rows 2 i and 2 i + 1 belong to one group."""
    groups = rows.group_ids
    apart = [i for i in range(len(rows) // 2) if groups[2 * i] != groups[2 * i + 1]]
    if apart or len(rows) % 2:
        first = f"rows {2 * apart[0]} and {2 * apart[0] + 1} are of two prompts" if apart else "one row is left over"
        raise ValueError(
            f"DiffusionDPO compares rows 2 i (winner) and 2 i + 1 (loser) of one prompt, and {first}: order the rows "
            "with unirl.algorithms.shared.groups.in_pairs"
        )
