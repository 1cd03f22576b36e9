"""Trains one backend with a loss for each of several tracks: in one joint update, or in an update for each track.

    joint         for each update: sum over tracks of w_t / n_t times the gradient of the loss of track t -> step
    alternating   for each update: for each track: w_t / n_t times the gradient of its loss -> step

n_t is the number of elements of track t in the update, over all ranks, and w_t its loss weight. The anchors of all
tracks are measured before the first update of a step, so every ratio is one to the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta

from unirl.config.errors import InvalidValueError
from unirl.distributed.group.dispatch import scatter
from unirl.train.backend.base import TrainBackend
from unirl.train.stack import PreparedStep, TrainStack, Update, loss_metric, merge_ranks
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metric, Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutResp

SHARED = ""
"""The name under which a step reports the metrics of the weights, which the tracks share."""
OF_TRACKS = ("micro_batch_size", "max_grad_norm", "num_updates_per_batch", "max_nonfinite_updates")
"""The settings that the stack of each track has as well."""

TrackResults = dict[str, TrainStepResult]


def merge_tracks(results: Sequence[TrackResults]) -> TrackResults:
    """Merge the results of all ranks, track by track."""
    return {name: merge_ranks([rank[name] for rank in results]) for name in results[0]}


@dataclass(eq=False)
class UnifiedModelStack:
    """Trains the tracks of a response whose rows are divided by the rows of the first track."""

    toy: ClassVar[Mapping[str, object]] = {"micro_batch_size": 2}

    backend: TrainBackend
    stacks: Mapping[str, TrainStack]
    """The loss and the policy of each trained track, on this backend."""
    _: KW_ONLY
    schedule: Literal["joint", "alternating"] = "joint"
    """joint = one optimizer update for all tracks; alternating = one for each track, in the order of the tracks."""
    loss_weights: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """The factor of the loss of each track. A track without an entry has the factor 1."""
    balance: Literal["fixed", "gradient_norm"] = "fixed"
    """gradient_norm scales the gradients of a joint update so that their norms have the ratio of `loss_weights`.

    The gradients g_t of the tracks become w_t g_t / |g_t|, times the weighted mean of the norms |g_t|.
    """
    micro_batch_size: int | Literal["auto"] = "auto"
    """Rows of one track per forward and backward pass. The word "auto" lets the plan choose for each track."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient is clipped to this norm before each update."""
    num_updates_per_batch: int = 1
    """Updates of each track per rollout. Each one uses different rows."""
    max_nonfinite_updates: int = 3
    """Stop the run after this many consecutive updates whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.loss_weights if name not in self.stacks]
        if unknown:
            raise InvalidValueError(
                f"stack.loss_weights names the track {unknown[0]!r}, which has no loss. The trained tracks are "
                f"{', '.join(self.stacks)}"
            )
        if self.balance == "gradient_norm" and self.schedule == "alternating":
            raise InvalidValueError(
                "stack.balance=gradient_norm balances the gradients that one joint update adds up, and "
                "stack.schedule=alternating makes an update of each. Use schedule=joint, or balance=fixed"
            )

    @scatter(merge_tracks, unread=("decoded",))
    def train_tracks(self, resp: RolloutResp, now: Mapping[str, TrainingProgress]) -> TrackResults:
        """Train on all rows of the tracks that have a stack. The metrics of the weights have the name "".

        Args:
            now: the progress of each track.
        """
        is_joint = self.schedule == "joint"
        first = next(iter(self.stacks))
        work = {
            name: stack.prepare(resp.tracks[name], now[name], is_first=is_joint or name == first)
            for name, stack in self.stacks.items()
        }
        update = self._joint if is_joint else self._alternating
        results = [update(work, u) for u in range(self.num_updates_per_batch)]
        for name, prepared in work.items():
            results[0][name] = merge([results[0][name], prepared.parity])
        self.backend.finish_step()
        return {name: TrainStepResult(tuple(result[name] for result in results)) for name in results[0]}

    def _weight(self, track: str) -> float:
        return self.loss_weights.get(track, 1.0)

    def _joint(self, work: Mapping[str, PreparedStep], number: int) -> dict[str, Metrics]:
        """One update by the weighted sum of the gradients of all tracks."""
        counts = {name: self.stacks[name].count(prepared.updates[number]) for name, prepared in work.items()}
        # Every rank sees the same counts, so all ranks leave out the same tracks.
        trained = [name for name, count in counts.items() if count]
        metrics: dict[str, Metrics] = {name: {} for name in work}
        if not trained:
            return metrics | {SHARED: {"train/skipped_updates": Metric.sum(1.0)}}
        apart = self.balance == "gradient_norm"
        totals: list[torch.Tensor] = []
        for name in trained:
            is_last = apart or name == trained[-1]
            scale = (1.0 if apart else self._weight(name)) / counts[name]
            total, own = self._accumulate(name, work[name], number, scale, is_last, first=number == 0)
            totals.append(total)
            metrics[name] = loss_metric(total) | own
            if apart:
                self.backend.set_gradient_aside()
        if apart:
            norms = self.backend.join_gradients([self._weight(name) for name in trained])
            for name, norm in zip(trained, norms, strict=True):
                metrics[name]["train/grad_norm"] = Metric.mean(norm)
        step = self.stacks[trained[-1]].step(torch.stack(totals).sum(), {})
        return metrics | {SHARED: step}

    def _alternating(self, work: Mapping[str, PreparedStep], number: int) -> dict[str, Metrics]:
        """One update for each track, in the order of the tracks."""
        metrics: dict[str, Metrics] = {SHARED: {}}
        for i, (name, prepared) in enumerate(work.items()):
            stack, count = self.stacks[name], self.stacks[name].count(prepared.updates[number])
            if not count:
                metrics[name] = {"train/skipped_updates": Metric.sum(1.0)}
                continue
            is_first = number == 0 and i == 0
            scale = self._weight(name) / count
            total, own = self._accumulate(name, prepared, number, scale, is_last=True, first=is_first)
            metrics[name] = stack.step(total, own)
        return metrics

    def _accumulate(
        self, track: str, prepared: PreparedStep, number: int, scale: float, is_last: bool, first: bool
    ) -> tuple[torch.Tensor, Metrics]:
        micros: Update = prepared.updates[number]
        return self.stacks[track].accumulate(micros, prepared.now, first, scale, is_last)
