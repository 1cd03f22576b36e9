"""What a loss is: a pure function of a stage and rows, which a train stack divides once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from unirl.algorithms.shared.kl import KLController
from unirl.types.protocols import Anchor, Needs, Quantity, TrainingProgress
from unirl.types.results import Metrics, merge
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

Stage = TypeVar("Stage")
"""The policy that a loss replays: `DiffusionStage`, `ARStage`, `ActionStage`."""

Part = tuple[int, ...]
"""A piece of the work on a row, forwarded at once: denoising steps, timesteps, or all tokens."""

PolicyOutputs = dict[Quantity, Tensor]
"""What a policy says of some rows and a part, detached: quantity -> [B, len(part), ...]."""

START = TrainingProgress()
"""The beginning of a run."""

Backward = Callable[[Tensor, bool], None]
"""Takes a loss to differentiate, and whether it is the last one of these rows."""


@dataclass(frozen=True)
class LossResult:
    """The loss of some rows and one part."""

    loss: Tensor
    """[] SUM over the elements (row x entry of the part), each times its row's weight."""
    metrics: Metrics
    outputs: PolicyOutputs
    """What the weights that were differentiated said: the anchors of a first update."""


@dataclass(frozen=True, kw_only=True)
class BaseAlgorithmConfig:
    """The recipe keys of a loss: a loss is a frozen dataclass, its fields are its keys, and it holds nothing else."""


@dataclass(frozen=True, kw_only=True)
class StageAlgorithm(BaseAlgorithmConfig, ABC, Generic[Stage]):
    """The loss of one track.

    A loss writes `parts`, `loss` and `measure` (and `count`, if an element is not a row times an entry of a part), and
    says which anchors it reads.
    """

    supports_multi_update: ClassVar[bool] = True
    """The loss stays valid after an update on the same rollout."""
    sampled_by: ClassVar[type] = object
    """The settings of sampling whose segments it trains."""
    requires_ema_rollout: ClassVar[bool] = False
    """Sampling must run on a snapshot instead of the live weights."""
    trains_tokens: ClassVar[bool] = False
    """Rows are of unequal length, so that micro-batches can be cut by tokens."""

    @property
    def needs(self) -> Needs:
        """What the rest must offer."""
        snapshots = {anchor.snapshot for anchor in self.anchors().values()} - {"live"}
        return Needs(
            snapshots=tuple(sorted(snapshots)),
            multi_update=self.supports_multi_update,
            ema_rollout=self.requires_ema_rollout,
        )

    def anchors(self) -> Mapping[str, Anchor]:
        """PolicyOutputs of other policies that `loss` reads, by name."""
        return {}

    @abstractmethod
    def parts(self, segment: LatentSegment) -> list[Part]:
        """The pieces of the work, from the recipe and the segment's shared fields alone: equal on every rank."""

    @abstractmethod
    def loss(self, stage: Stage, rows: RolloutTrack, part: Part, now: TrainingProgress = START) -> LossResult:
        """The loss of `rows` and one part. A live anchor that is absent is the loss's own detached value."""

    @abstractmethod
    def measure(self, stage: Stage, rows: RolloutTrack, part: Part) -> PolicyOutputs:
        """What the stage's current weights say of `rows` and one part, computed as `loss` computes it."""

    def count(self, rows: RolloutTrack) -> float:
        """The number of elements over all parts, each times its row's weight: what the sum of losses is divided by."""
        return float(rows.weight.sum()) * sum(len(part) for part in self.parts(rows.segment))

    def element_advantages(self, rows: RolloutTrack, part: Part) -> Tensor:
        """[B, len(part)] the advantage of every element."""
        assert rows.advantages is not None, "training needs advantages: compute_advantages comes before train_track"
        return rows.advantages[:, None].expand(-1, len(part))

    def anchor(self, rows: RolloutTrack, name: str, part: Part) -> Tensor | None:
        """[B, len(part), ...] an anchor column's entries; None before the anchor pass has filled it."""
        column: Tensor | None = rows.segment.anchors.get(name)
        if column is None:
            return None
        order = [entry for each in self.parts(rows.segment) for entry in each]
        return column[:, [order.index(entry) for entry in part]]

    def totals(self, rows: RolloutTrack, now: TrainingProgress) -> Tensor:
        """[K] float64 sums over `rows`, whose anchors are filled: `loss` finds those of the whole step in `now.totals`.

        Asked by the stack if `needs.totals`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs totals and does not say which")

    def check_sampling(self, sampling: Any) -> None:
        """Raises ConfigError where the recipe's sampling settings, of the stage's own kind, cannot be trained."""
        return None

    def trust_width(self) -> float | None:
        """Half the width of the trust region on the ratio, by which disagreement is judged; None: no ratio."""
        return None

    def kl_controller(self) -> KLController | None:
        """Controller that turns the logged `train/kl` into `TrainingProgress.kl_scale`. None keeps the scale at 1."""
        return None

    def parity(self, rows: RolloutTrack, part: Part, outputs: PolicyOutputs) -> Metrics:
        """How far `outputs` (measured on the weights that sampled) are from what the engine recorded."""
        return {}

    def prepare_segment(
        self, stage: Stage, rows: RolloutTrack, snapshot: str
    ) -> tuple[LatentSegment | TextSegment, Metrics]:
        """The anchor pass: the segment with the anchors of `snapshot`, whose weights are in force, and parity.

        The slices are those that `compute_loss_and_backward` trains, so a live anchor has the bits of that forward.
        """
        wanted = {name: a.quantity for name, a in self.anchors().items() if a.snapshot == snapshot}
        measured: dict[str, list[Tensor]] = {name: [] for name in wanted}
        found: list[Metrics] = []
        for part in self.parts(rows.segment):
            with torch.no_grad():
                outputs = self.measure(stage, rows, part)
            if snapshot == "live":
                found.append(self.parity(rows, part, outputs))
            for name, quantity in wanted.items():
                measured[name].append(outputs[quantity])
        anchors = {name: _joined(pieces) for name, pieces in measured.items()}
        return rows.segment.replace(anchors={**rows.segment.anchors, **anchors}), merge(found)

    def compute_loss_and_backward(
        self,
        stage: Stage,
        rows: RolloutTrack,
        backward: Backward,
        now: TrainingProgress = START,
        first_update: bool = False,
    ) -> Metrics:
        """The gradient of `rows`, one part at a time, so that one graph is alive at once.

        Args:
            first_update: the weights are still those that sampled, so parity can be measured.
        """
        parts = self.parts(rows.segment)
        found: list[Metrics] = []
        for i, part in enumerate(parts):
            result = self.loss(stage, rows, part, now)
            backward(result.loss, i == len(parts) - 1)
            found.append(result.metrics)
            if first_update:
                found.append(self.parity(rows, part, result.outputs))
        return merge(found)


def _joined(pieces: list[Tensor]) -> Tensor:
    """PolicyOutputs of several parts as one; packed outputs come in one piece."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
