"""PPO with a critic over latents and noise levels: GAE gives every denoising step its own advantage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.algorithms.base import LOSS_RMS, START, Backward, LatentRows, LossResult, Observe, Part, PolicyOutputs
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.critic import OLD_VALUE, GAEInputs, OutcomeCritic, StepCredit, gae, outcome_rewards
from unirl.algorithms.shared.surrogate import weighted_sum
from unirl.config.errors import InvalidValueError
from unirl.models.denoising.stage import DiffusionStage
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metric, Metrics
from unirl.types.segments import LatentSegment

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class DiffusionPPO(OutcomeCritic[DiffusionStage, LatentSegment], DiffusionGRPO):
    """L = mean over rows and stochastic steps of  P_i + vf_coef V_i.

    P_i  the clipped surrogate of `DiffusionGRPO`, with the advantage A_i of the step instead of that of the sample
    V_i  max((V - R_i)^2, (clip(V, V_old +- value_clip) - R_i)^2) / 2,  V = V(x_i, sigma_i, prompt),  R_i = A_i + V_old
    A_i  GAE (arXiv:1506.02438, eq. 16) over the trained steps in order of time; the reward of the last step is the
         outcome of the row, the reward of every other step is 0, and no value follows the last step

    PPO: Schulman et al. 2017, arXiv:1707.06347. DPOK (arXiv:2305.16381) is this loss with lam = 1, so that
    A_i = R - V(x_i), outcome: rewards, a wide clip and kl_coef > 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward":
            raise InvalidValueError(
                "algorithm.kl_in=reward takes the KL of one step off that step's advantage, and the advantages of "
                "DiffusionPPO hold what later steps earn as well. Use algorithm.kl_in=loss"
            )

    def measure(self, stage: DiffusionStage, rows: LatentRows, part: Part) -> PolicyOutputs:
        values = stage.values(rows.conditions, rows.segment, part)
        return {**super().measure(stage, rows, part), "value": values.detach()}

    def loss(self, stage: DiffusionStage, rows: LatentRows, part: Part, now: TrainingProgress = START) -> LossResult:
        """The policy loss of `DenoisingLoss.loss` plus the value loss."""
        rows = self.with_old_values(stage, rows)
        policy = super().loss(stage, rows, part, now)
        output = stage.values(rows.conditions, rows.segment, part)  # [B, S]
        weights = rows.weight[:, None].expand_as(output)
        values = torch.where(weights > 0, output, 0.0)
        old = self.filled_anchor(rows, OLD_VALUE, part)
        returns = rows.segment.columns(self.gae_credit(rows).returns, part)
        losses, metrics = self.value_losses(values, old, returns, weights)
        total = policy.loss + self.vf_coef * weighted_sum(losses, weights)
        # The elements of the value loss are counted beside those of the policy loss.
        metrics[LOSS_RMS] = policy.metrics[LOSS_RMS].merged(Metric.rms(self.vf_coef * losses.detach(), weights))
        outputs: PolicyOutputs = {**policy.outputs, "value": output.detach()}
        return replace(policy, loss=total, metrics=policy.metrics | metrics, outputs=outputs)

    def compute_loss_and_backward(
        self,
        stage: DiffusionStage,
        rows: LatentRows,
        backward: Backward,
        now: TrainingProgress = START,
        first_update: bool = False,
        observe: Observe | None = None,
    ) -> Metrics:
        # The old values of all parts are computed once here, not in `loss` of every part.
        rows = self.with_old_values(stage, rows)
        return super().compute_loss_and_backward(stage, rows, backward, now, first_update, observe)

    def element_advantages(self, rows: LatentRows, part: Part) -> Float[Tensor, "B S"]:
        return rows.segment.columns(self.gae_credit(rows).advantages, part)

    def gae_credit(self, rows: LatentRows) -> StepCredit:
        """GAE over all trained steps, in order of time [B, S]. Needs the old values of `rows`."""
        values = self.filled_anchor(rows, OLD_VALUE, rows.segment.sde_indices)
        mask = torch.ones_like(values, dtype=torch.bool)
        rewards = outcome_rewards(self.row_return(rows), mask)
        return gae(GAEInputs.from_rows(rewards, values, mask), self.gamma, self.lam)

    def with_old_values(self, stage: DiffusionStage, rows: LatentRows) -> LatentRows:
        """`rows` with old values at all trained steps: those of the anchor pass, or the current values of the head.

        Every part needs the values of all steps, because the advantage of a step depends on the values of later steps.
        They are computed part by part, as in `loss`, so that they equal its values to the bit.
        """
        if OLD_VALUE in rows.segment.anchors:
            return rows
        with torch.no_grad():
            values = [stage.values(rows.conditions, rows.segment, part) for part in self.parts(rows.segment)]
        anchors = {**rows.segment.anchors, OLD_VALUE: torch.cat(values, dim=1)}
        return rows.replace(segment=rows.segment.replace(anchors=anchors))
