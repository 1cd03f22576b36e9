"""The contract of losses on transitions of a replay store, which `unirl.train.replay_stack.ReplayStack` trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import START, LossResult, Part, PolicyOutputs, StageAlgorithm
from unirl.models.policies.stage import ActionStage
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metrics
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment
from unirl.types.transitions import Transitions

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a minibatch."""

    loss: Tensor
    """[] the loss, to be differentiated."""
    parts: Mapping[str, Tensor]
    """[] detached parts of it, by name."""
    errors: Tensor | None = None
    """[N] size of the error of each transition, by which a prioritised store draws. None: the loss has none."""


@dataclass(frozen=True, kw_only=True)
class TransitionLoss(StageAlgorithm[ActionStage, ActionSegment]):
    """A loss of minibatches that are drawn from stored transitions, not of the rows of a step."""

    has_errors: ClassVar[bool] = False
    """The loss measures the error of each transition, so that the store may be prioritised."""
    sampled_by: ClassVar[type] = ActionSamplingParams
    trains_on_rows: ClassVar[bool] = False

    @abstractmethod
    def transitions(
        self, stage: ActionStage, segment: ActionSegment, weight: Float[Tensor, "B"], n_step: int
    ) -> Transitions:
        """The transitions of the policy's own rows that the store keeps."""

    @abstractmethod
    def demonstrated(self, stage: ActionStage, segment: ActionSegment, n_step: int) -> Transitions:
        """The transitions of demonstrations, whose actions are those of the environment, [sum L, *action]."""

    @abstractmethod
    def transition_loss(self, stage: ActionStage, batch: Transitions, generator: torch.Generator) -> BatchLoss:
        """The loss of a minibatch, in which `batch.weights` multiply the errors.

        Args:
            generator: on the CPU; all random numbers of the loss come from it.
        """

    @abstractmethod
    def metrics(self, parts: Mapping[str, Float[Tensor, ""]]) -> Metrics:
        """The metrics of an update, from the parts of its loss."""

    def after_update(self, stage: ActionStage) -> None:
        """Called after an update that was applied. By default, it does nothing."""
        return None

    def check_own_rows(self, sampling: ActionSamplingParams) -> None:
        """Raises ConfigError if the loss cannot learn from rows that are sampled with these settings."""
        return None

    def check_demonstrations(self, has_rewards: bool) -> None:
        """Raises ConfigError if the loss cannot learn from these demonstrations."""
        return None

    # The parts of the contract that concern rows

    def parts(self, segment: ActionSegment) -> list[Part]:
        return [(0,)]

    def measure(self, stage: ActionStage, rows: RolloutTrack[Any], part: Part) -> PolicyOutputs:
        return {}

    def loss(
        self, stage: ActionStage, rows: RolloutTrack[Any], part: Part, now: TrainingProgress = START
    ) -> LossResult:
        raise AssertionError("a stack of rows refuses this loss")
