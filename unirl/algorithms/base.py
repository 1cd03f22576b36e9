"""The contract of a loss, and the two loops over its parts that the train stack calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from unirl.algorithms.shared.checks import check_coefficients
from unirl.algorithms.shared.contract import broken, check_metrics, check_outputs, check_total, computing, shown
from unirl.algorithms.shared.kl import AdaptiveKL, KLController
from unirl.config.errors import InvalidValueError
from unirl.types.facts import ModelFacts
from unirl.types.progress import progress
from unirl.types.protocols import Anchor, Needs, Quantity, TrainingProgress
from unirl.types.results import Metrics, merge
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import LatentSegment, PackedSegment, Segment

if TYPE_CHECKING:
    from jaxtyping import Float

StageT = TypeVar("StageT")
"""The type of policy that a loss replays: `DiffusionStage`, `DifferentiableStage` or `TokenStage`."""

SegmentT = TypeVar("SegmentT", bound=Segment, default=Segment)
"""The type of segment that a loss trains: `LatentSegment`, or `PackedSegment` for tokens and decisions."""

LatentRows = RolloutTrack[LatentSegment]
TokenRows = RolloutTrack[PackedSegment]

Part = tuple[int, ...]
"""The entries of a row that one forward pass covers: a group of denoising steps, a group of training times, or `(0,)`
for all tokens at once. A loss splits its work into parts so that the graph of only one part is in memory at a time."""

PolicyOutputs = dict[Quantity, Tensor]
"""Detached outputs of a policy for some rows and one part: quantity -> [B, len(part), ...], or [sum L] for tokens."""

LOSS_RMS = "train/loss_rms"
"""The metric that a loss reports as `Metric.rms` of its elements, for `stack.balance=uncertainty`."""

START = TrainingProgress()
"""The progress at the beginning of a run."""

Backward = Callable[[Tensor, bool], None]
"""Backpropagates a loss. The second argument is True for the last part of the rows."""

Observe = Callable[[Part, dict[str, Tensor]], None]
"""Gets the values of the elements of one part, which `StageAlgorithm.element_values` returned."""


@dataclass(frozen=True)
class LossResult:
    """The loss of some rows and one part."""

    loss: Tensor
    """[] sum of weight * loss over the elements. An element is a row at one entry of the part."""
    metrics: Metrics
    """They include LOSS_RMS, the size of the elements, if the loss is to be balanced by its uncertainty."""
    outputs: PolicyOutputs
    """Outputs of the weights that were differentiated. In the first update they are the values of the live anchors."""
    advantages: Tensor | None = None
    """Detached advantage of each element, in the shape of the log-probs. None: that of its row."""


@dataclass(frozen=True, kw_only=True)
class BaseAlgorithmConfig:
    """The recipe keys of a loss are the fields of its frozen dataclass. A loss has no other state."""

    def __post_init__(self) -> None:
        """Raises InvalidValueError for a key out of range. Subclasses add checks and call this method."""


@dataclass(frozen=True, kw_only=True)
class StageAlgorithm(BaseAlgorithmConfig, ABC, Generic[StageT, SegmentT]):
    """The loss of one track. This docstring maps the walk from the train stack to the equation.

        TrainStack.train_track                        for every update and micro-batch
          StageAlgorithm.prepare_segment              anchor pass: `measure` for every part, without gradients
          StageAlgorithm.compute_loss_and_backward    for every part in `parts`: `loss`, then backward
            <base class>.loss                         replays the part and adds penalties to the policy loss
              <loss>.policy_loss or .surrogate        the equation of the paper, often by shared/surrogate.py

    A part is a group of denoising steps, a group of training times, or all tokens: what one forward pass covers.

    Most losses inherit `loss` from one of four base classes and write one short method:

        DenoisingLoss   shared/denoising.py        write `policy_loss` and `old_quantities`: log-probs of replayed steps
        TokenLoss       shared/tokens.py           write `surrogate`: log-probs of replayed tokens
        PenalizedLoss   shared/forward_process.py  write `policy_loss`: velocities at clean samples with fresh noise
        RewardBackprop  drtune.py                  choose defaults: the gradient of the reward itself

    The log of the importance ratio, log pi_theta - log pi_old, is `DiffusionGRPO._log_ratio` for denoising steps
    (`DiffusionDPPO` and `DiffusionAWM` have their own in `policy_loss`) and `TokenLoss.tokens` for tokens.

    A loss that uses no base class writes `parts`, `loss` and `measure`, lists the anchors that it reads, and overrides
    `count` if an element is not a row at one entry of a part.
    """

    supports_multi_update: ClassVar[bool] = True
    """The loss stays valid after an update on the same rollout."""
    sampled_by: ClassVar[type] = object
    """The class of sampling settings whose segments this loss can train."""
    requires_ema_rollout: ClassVar[bool] = False
    """Sampling must use a weight snapshot instead of the live weights."""
    trains_on_rows: ClassVar[bool] = True
    """The loss is one of the rows of a step. False: it is one of transitions from a replay store."""
    trains_tokens: ClassVar[bool] = False
    """Rows have unequal lengths, so micro-batches can be divided by tokens."""

    @property
    def needs(self) -> Needs:
        """Requirements on the engine, the model, the reward and the backend. The preflight checks them."""
        snapshots = {anchor.snapshot for anchor in self.anchors().values()} - {"live"}
        return Needs(
            snapshots=tuple(sorted(snapshots)),
            multi_update=self.supports_multi_update,
            ema_rollout=self.requires_ema_rollout,
        )

    def anchors(self) -> Mapping[str, Anchor]:
        """Outputs of other policies that `loss` reads, by name."""
        return {}

    @abstractmethod
    def parts(self, segment: SegmentT) -> list[Part]:
        """The parts of every row, in order. They depend on the recipe and on fields that all ranks share."""

    @abstractmethod
    def loss(
        self, stage: StageT, rows: RolloutTrack[SegmentT], part: Part, now: TrainingProgress = START
    ) -> LossResult:
        """The loss of `rows` and one part. Where a live anchor is absent, the loss uses its own detached value."""

    @abstractmethod
    def measure(self, stage: StageT, rows: RolloutTrack[SegmentT], part: Part) -> PolicyOutputs:
        """The outputs of the current weights for `rows` and one part, computed exactly as `loss` computes them."""

    def count(self, rows: RolloutTrack[SegmentT]) -> float:
        """The weighted number of elements over all parts. The stack divides the sum of losses by it."""
        return float(rows.weight.sum()) * sum(len(part) for part in self.parts(rows.segment))

    def element_advantages(self, rows: RolloutTrack[SegmentT], part: Part) -> Float[Tensor, "..."]:
        """[B, len(part)] the advantage of every element; here that of its row."""
        assert rows.advantages is not None, "training needs advantages: compute_advantages comes before train_track"
        return rows.advantages[:, None].expand(-1, len(part))

    def anchor(self, rows: RolloutTrack[SegmentT], name: str, part: Part) -> Float[Tensor, "..."] | None:
        """[B, len(part), ...] the entries of an anchor. None before the anchor pass has filled it."""
        column: Tensor | None = rows.segment.anchors.get(name)
        if column is None:
            return None
        order = [entry for each in self.parts(rows.segment) for entry in each]
        return torch.stack([column[:, order.index(entry)] for entry in part], dim=1)

    def filled_anchor(self, rows: RolloutTrack[SegmentT], name: str, part: Part) -> Float[Tensor, "..."]:
        """The entries of an anchor that the anchor pass has filled."""
        column = self.anchor(rows, name, part)
        assert column is not None, f"the anchor pass comes before the loss: {name!r} is missing"
        return column

    def totals(self, rows: RolloutTrack[SegmentT], now: TrainingProgress) -> Float[Tensor, "K"]:
        """[K] float64 sums over `rows`, whose anchors are filled. `loss` reads the sums of the step in `now.totals`.

        The stack calls this only if `needs.totals` is True.
        """
        raise NotImplementedError(f"{type(self).__name__} sets needs.totals and does not implement totals()")

    def build_head(self, stage: StageT, width: int, seed: int) -> nn.Module:
        """The module that the backend trains beside the policy if `needs.value` is True: the stage's value head."""
        head: nn.Module = cast(Any, stage).build_value_head(width, seed)
        return head

    def check_sampling(self, sampling: Any) -> None:
        """Raises ConfigError if segments with these sampling settings, of class `sampled_by`, cannot be trained."""
        return None

    def check_facts(self, facts: ModelFacts) -> None:
        """Raises ConfigError if a model with these facts cannot be trained."""
        return None

    def trust_width(self) -> float | None:
        """Half the width of the trust region on the importance ratio. None: the loss has no such region.

        The parity gate measures the disagreement between engine and trainer in this unit.
        """
        return None

    def kl_controller(self) -> KLController | None:
        """Controller that turns the logged `train/kl` into `TrainingProgress.kl_scale`. None keeps the scale at 1."""
        return None

    def parity(self, rows: RolloutTrack[SegmentT], part: Part, outputs: PolicyOutputs) -> Metrics:
        """Metrics of the difference between the engine's record and `outputs` of the same weights."""
        return {}

    def element_values(
        self, rows: RolloutTrack[SegmentT], part: Part, result: LossResult
    ) -> dict[str, Float[Tensor, "*elements"]]:
        """Detached values of the elements of a part by name, to be shown to people. None by default."""
        return {}

    def prepare_segment(self, stage: StageT, rows: RolloutTrack[SegmentT], snapshot: str) -> tuple[SegmentT, Metrics]:
        """The anchor pass: the segment with the anchors of `snapshot`, and parity metrics if it is "live".

        The caller has loaded the weights of `snapshot`. Parts are those of `compute_loss_and_backward`, so a live
        anchor equals the value of that forward pass to the bit.
        """
        quantities = {name: anchor.quantity for name, anchor in self.anchors().items() if anchor.snapshot == snapshot}
        measured: dict[str, list[Tensor]] = {name: [] for name in quantities}
        metrics: list[Metrics] = []
        for part in self.parts(rows.segment):
            with torch.no_grad(), computing(self, "measure"):
                outputs = self.measure(stage, rows, part)
            check_outputs(self, "measure", outputs, quantities.values())
            if snapshot == "live":
                metrics.append(self.parity(rows, part, outputs))
            for name, quantity in quantities.items():
                measured[name].append(outputs[quantity])
        # Packed tokens have one part, which is returned as it is.
        anchors = {name: v[0] if len(v) == 1 else torch.cat(v, dim=1) for name, v in measured.items()}
        return rows.segment.replace(anchors={**rows.segment.anchors, **anchors}), merge(metrics)

    def compute_loss_and_backward(
        self,
        stage: StageT,
        rows: RolloutTrack[SegmentT],
        backward: Backward,
        now: TrainingProgress = START,
        first_update: bool = False,
        observe: Observe | None = None,
    ) -> Metrics:
        """Accumulates the gradient of `rows`, one part at a time, and returns the metrics of all parts.

        In the first update the weights are still those that sampled, so parity with the engine is measured, too.
        `observe` gets the `element_values` of every part.
        """
        parts = self.parts(rows.segment)
        metrics: list[Metrics] = []
        for i, part in enumerate(parts):
            with computing(self, "loss"):
                result = self.loss(stage, rows, part, now)
            self._check_result(result)
            backward(result.loss, i == len(parts) - 1)
            metrics.append(result.metrics)
            if first_update:
                metrics.append(self.parity(rows, part, result.outputs))
            if observe is not None:
                observe(part, self.element_values(rows, part, result))
            progress("part of the loss", len(parts))
        return merge(metrics)

    def _check_result(self, result: LossResult) -> None:
        """Raises PluginError if `loss` returned something else than its contract says."""
        if not isinstance(result, LossResult):
            raise broken(self, "loss", shown(result), "It must return a unirl.algorithms.base.LossResult")
        check_total(self, result.loss)
        check_metrics(self, "loss", result.metrics)
        live = [anchor.quantity for anchor in self.anchors().values() if anchor.snapshot == "live"]
        check_outputs(self, "loss", result.outputs, live)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(StageAlgorithm[StageT, SegmentT]):
    """Base class of losses on log-probs of replayed steps or tokens, with a KL to the policy at initialisation."""

    old_logp_source: Literal["replay", "rollout"] = "replay"
    """pi_old: replayed by the trainer (ratio exactly 1 in the first update), or the engine's recorded log-probs."""
    kl_coef: float = 0.0
    """beta, the factor of KL(pi_theta || reference) per step or token, in the unit of log-probs; 0 = no KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: subtracted from the reward of every step or token."""
    kl_adaptive: AdaptiveKL | None = None
    """Adapts beta to hold a target divergence; null = beta follows the recipe alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficients(kl_coef=self.kl_coef)
        if self.kl_adaptive is not None and self.kl_coef == 0.0:
            raise InvalidValueError(
                "algorithm.kl_adaptive adapts algorithm.kl_coef, which is 0: set kl_coef to its initial value, "
                "or leave kl_adaptive out"
            )

    def kl_controller(self) -> KLController | None:
        return None if self.kl_adaptive is None else KLController(self.kl_adaptive)

    def element_values(
        self, rows: RolloutTrack[SegmentT], part: Part, result: LossResult
    ) -> dict[str, Float[Tensor, "*elements"]]:
        """`log_ratio`: log-prob under the weights that are trained minus the recorded one, nats. `advantage`."""
        values = {"log_ratio": result.outputs["logp"] - rows.segment.recorded(part)}
        return values if result.advantages is None else {**values, "advantage": result.advantages}
