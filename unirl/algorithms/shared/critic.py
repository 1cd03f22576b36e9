"""What losses with a value head share: their keys, what a row earns, and the loss of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.base import Stage, StageAlgorithm
from unirl.algorithms.shared.gae import value_loss, value_metrics
from unirl.algorithms.shared.surrogate import mean_metric
from unirl.config.errors import InvalidValueError
from unirl.types.protocols import Anchor, Needs
from unirl.types.results import Metrics
from unirl.types.rollout_resp import RolloutTrack

OLD_VALUE = "old_value"


@dataclass(frozen=True, kw_only=True)
class Critic(StageAlgorithm[Stage]):
    """The half of a loss that a value head adds; the first base of a loss, before that of the policy.

    A row earns its outcome after its last step and nothing before. GAE (arXiv:1506.02438, eq. 16) makes an advantage of
    each step out of that and the values from before the first update; the head learns what each step was worth.
    """

    gamma: float = 1.0
    """Discount per trained step."""
    lam: float = 0.95
    """lambda of GAE: 1 waits for the outcome, 0 believes the value head."""
    outcome: Literal["advantages", "rewards"] = "advantages"
    """What a sample earns: the driver's normalised advantage, or the raw reward (on a scale that V must then learn)."""
    vf_coef: float = 0.5
    """Of the value loss. The head has weights and an optimizer group of its own."""
    value_clip: float | None = 0.2
    """How far V may move from V_old in the loss, in units of the outcome; absent = no clip."""

    def check_critic(self) -> None:
        """Raises ConfigError for a key out of range."""
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise InvalidValueError(f"algorithm.{name} must lie in [0, 1], got {value}; 1 is usual")
        if not self.vf_coef > 0:
            raise InvalidValueError(
                f"algorithm.vf_coef must be > 0, got {self.vf_coef}; without a value head, use DiffusionGRPO or ARGRPO"
            )
        if self.value_clip is not None and not self.value_clip > 0:
            raise InvalidValueError(f"algorithm.value_clip must be > 0, got {self.value_clip}; write null for no clip")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, value=True, advantages=self.outcome == "advantages")

    def anchors(self) -> Mapping[str, Anchor]:
        return {**super().anchors(), OLD_VALUE: Anchor("live", "value")}

    def earned(self, rows: RolloutTrack) -> Tensor:
        """[B] the outcome of each row."""
        outcome = rows.rewards if self.outcome == "rewards" else rows.advantages
        assert outcome is not None, "training needs rewards and advantages: compute_advantages comes before train_track"
        return outcome

    def value_losses(self, values: Tensor, old: Tensor, returns: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
        """The head's loss per element, before vf_coef, and how well it predicts.

        Args:
            values, old, returns, weights: one shape; finite. Elements of weight 0 are logged nowhere.
        """
        losses = value_loss(values, old, returns, self.value_clip)
        metrics = value_metrics(values, returns, losses, weights)
        if self.value_clip is not None:
            with torch.no_grad():
                moved = ((values - old).abs() > self.value_clip).float()
            metrics["train/value_clip_fraction"] = mean_metric(moved, weights)
        return losses, metrics
