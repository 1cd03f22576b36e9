"""PPO with a critic over latents and noise levels: each denoising step is credited with what it changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.base import START, Backward, LossResult, Part, PolicyOutputs
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.shared.critic import OLD_VALUE, Critic, GAEInputs, StepCredit, gae, outcome_rewards
from unirl.algorithms.shared.surrogate import weighted_sum
from unirl.config.errors import InvalidValueError
from unirl.models.denoising.stage import DiffusionStage
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metrics
from unirl.types.rollout_resp import RolloutTrack


@dataclass(frozen=True, kw_only=True)
class DiffusionPPO(Critic[DiffusionStage], DiffusionGRPO):
    """L = mean over rows and stochastic steps of  P_i + vf_coef V_i.

    P_i  DiffusionGRPO's clipped surrogate, of the advantage A_i instead of the sample's
    V_i  max((V - R_i)^2, (clip(V, V_old +- value_clip) - R_i)^2) / 2,  V = V(x_i, sigma_i, prompt),  R_i = A_i + V_old
    A_i  GAE (arXiv:1506.02438, eq. 16) over the trained steps in order of time: the row's outcome arrives after the
         last of them, the others earn 0, and nothing follows

    PPO is arXiv:1707.06347. DPOK (arXiv:2305.16381) is this with lam = 1, so that A_i = R - V(x_i), outcome: rewards,
    a wide clip and kl_coef > 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_critic()
        if self.kl_in == "reward":
            raise InvalidValueError(
                "algorithm.kl_in=reward takes the KL of one step off that step's advantage, and the advantages of "
                "DiffusionPPO hold what later steps earn as well. Use algorithm.kl_in=loss"
            )

    def measure(self, stage: DiffusionStage, rows: RolloutTrack, part: Part) -> PolicyOutputs:
        said = stage.values(rows.conditions, rows.segment, part)
        return {**super().measure(stage, rows, part), "value": said.detach()}

    def loss(self, stage: DiffusionStage, rows: RolloutTrack, part: Part, now: TrainingProgress = START) -> LossResult:
        rows = self.with_old_values(stage, rows)
        policy = super().loss(stage, rows, part, now)
        said = stage.values(rows.conditions, rows.segment, part)  # [B, S']
        weights = rows.weight[:, None].expand_as(said)
        values = torch.where(weights > 0, said, 0.0)
        old, returns = self._old_values(rows, part), self._at(part, rows, self.gae_credit(rows).returns)
        losses, metrics = self.value_losses(values, old, returns, weights)
        total = policy.loss + self.vf_coef * weighted_sum(losses, weights)
        return LossResult(total, policy.metrics | metrics, {**policy.outputs, "value": said.detach()})

    def compute_loss_and_backward(
        self,
        stage: DiffusionStage,
        rows: RolloutTrack,
        backward: Backward,
        now: TrainingProgress = START,
        first_update: bool = False,
    ) -> Metrics:
        # Once for all parts.
        return super().compute_loss_and_backward(stage, self.with_old_values(stage, rows), backward, now, first_update)

    def element_advantages(self, rows: RolloutTrack, part: Part) -> Tensor:
        return self._at(part, rows, self.gae_credit(rows).advantages)

    def gae_credit(self, rows: RolloutTrack) -> StepCredit:
        """GAE over all trained steps of rows whose old values are known; in order of time."""
        values = self._old_values(rows, self._steps(rows))
        mask = torch.ones_like(values, dtype=torch.bool)
        return gae(
            GAEInputs.from_rows(outcome_rewards(self.row_return(rows), mask), values, mask),
            self.gamma,
            self.lam,
        )

    def with_old_values(self, stage: DiffusionStage, rows: RolloutTrack) -> RolloutTrack:
        """`rows` with old values at all trained steps: those of the anchor pass, else what the head says now.

        A part needs them all, since a step's advantage holds the values of later ones. Cut as `loss` cuts its own, so
        that they have the bits of its forward.
        """
        if OLD_VALUE in rows.segment.anchors:
            return rows
        with torch.no_grad():
            said = [stage.values(rows.conditions, rows.segment, part) for part in self.parts(rows.segment)]
        anchors = {**rows.segment.anchors, OLD_VALUE: torch.cat(said, dim=1)}
        return rows.replace(segment=rows.segment.replace(anchors=anchors))

    def _old_values(self, rows: RolloutTrack, steps: Part) -> Tensor:
        values = self.anchor(rows, OLD_VALUE, steps)
        assert values is not None, "with_old_values() comes first"
        return values

    def _steps(self, rows: RolloutTrack) -> Part:
        return tuple(sorted(step for part in self.parts(rows.segment) for step in part))

    def _at(self, part: Part, rows: RolloutTrack, in_time: Tensor) -> Tensor:
        """[B, len(part)] of [B, S] values in order of time."""
        steps = self._steps(rows)
        return in_time[:, [steps.index(step) for step in part]]
