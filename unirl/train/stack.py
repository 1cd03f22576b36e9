"""Trains one backend with one loss: divides rows into updates and micro-batches, and runs the anchor pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import START, StageAlgorithm
from unirl.config.errors import DivergenceError, GeometryError, IncompatibleError, InvalidValueError
from unirl.distributed import current
from unirl.distributed.group.dispatch import scatter
from unirl.train.backend.base import TrainBackend, UpdateStats
from unirl.train.parity import parity_of
from unirl.types.protocols import REFERENCE, TrainingProgress
from unirl.types.results import Metric, Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutTrack

Update = list[RolloutTrack]
"""The micro-batches of one update, in order."""


def merge_ranks(results: Sequence[TrainStepResult]) -> TrainStepResult:
    """Merge the results of all ranks, update by update."""
    return TrainStepResult(tuple(merge(ranks) for ranks in zip(*(r.updates for r in results), strict=True)))


class TrainStack:
    """Trains a track: anchors -> for each update: for each micro-batch: for each part: backward -> step.

    An algorithm returns losses as sums over elements. Each update divides them once, by its number of elements over all
    ranks, so the gradient does not depend on how rows are cut into micro-batches and parts. Every rank runs the same
    number of micro-batches.
    """

    toy: ClassVar[Mapping[str, object]] = {"micro_batch_size": 2}

    def __init__(
        self,
        backend: TrainBackend,
        algorithm: StageAlgorithm[Any],
        stage: Any,  # the policy that the algorithm replays; only the algorithm knows its type
        *,
        micro_batch_size: int = 1,
        micro_batch_tokens: int | None = None,
        max_grad_norm: float = 1.0,
        num_updates_per_batch: int = 1,
        max_nonfinite_updates: int = 3,
    ) -> None:
        """
        Args:
            micro_batch_size: number of rows per forward and backward pass. It changes memory and speed, not the
                gradient.
            micro_batch_tokens: replaces `micro_batch_size` for rows of unequal length. A micro-batch holds whole rows
                with at most this many prompt and response tokens. A longer row forms a micro-batch by itself.
            max_grad_norm: the gradient is clipped to this norm before each update.
            num_updates_per_batch: number of optimizer updates per rollout. Each update uses different rows.
            max_nonfinite_updates: stop the run after this many consecutive updates whose loss or gradient is not
                finite.
        """
        self.backend = backend
        self.algorithm = algorithm
        self.stage = stage
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.max_grad_norm = max_grad_norm
        self.num_updates_per_batch = num_updates_per_batch
        self.max_nonfinite_updates = max_nonfinite_updates
        self._check_settings()
        for name in algorithm.needs.snapshots:
            self._provide_snapshot(name)
        if algorithm.needs.value:
            self.stage.value_head = backend.provide_value_head(stage.build_value_head)

    def _check_settings(self) -> None:
        for name in ("micro_batch_size", "micro_batch_tokens", "num_updates_per_batch", "max_nonfinite_updates"):
            if vars(self)[name] is not None and vars(self)[name] < 1:
                raise InvalidValueError(f"stack.{name} must be >= 1, got {vars(self)[name]}")
        if self.max_grad_norm <= 0:
            raise InvalidValueError(f"stack.max_grad_norm must be > 0, got {self.max_grad_norm}")
        needs, name = self.algorithm.needs, type(self.algorithm).__name__
        if self.num_updates_per_batch > 1 and not needs.multi_update:
            raise IncompatibleError(
                f"stack.num_updates_per_batch={self.num_updates_per_batch}: {name} is valid only for one update per "
                "rollout. Use 1"
            )
        if self.micro_batch_tokens is None and self.micro_batch_size % needs.rows_together:
            raise GeometryError(
                f"stack.micro_batch_size={self.micro_batch_size} would split the {needs.rows_together} adjacent rows "
                f"that {name} compares. Use a multiple of {needs.rows_together}"
            )

    def _provide_snapshot(self, name: str) -> None:
        """Take the snapshot `reference` unless it was loaded. The stack is built before the first update."""
        if self.backend.has_snapshot(name):
            return
        if name != REFERENCE:
            raise IncompatibleError(
                f"{type(self.algorithm).__name__} reads the weight snapshot {name!r}, which the backend does not keep. "
                "Set backend.ema_lora_cfg for `old`, backend.ema_cfg for `ema`, and backend.snapshots for any other"
            )
        self.backend.snapshot(name)

    @scatter(merge_ranks)
    def train_track(self, track: RolloutTrack, now: TrainingProgress = START) -> TrainStepResult:
        """Train on all rows of `track`. The result has one entry of metrics per update."""
        updates = self._split(track)
        parity = self._prepare(updates)
        now = self._with_totals(updates, now)
        results = [self._update(micros, now, first=u == 0) for u, micros in enumerate(updates)]
        results[0] = merge([results[0], parity])
        self.backend.finish_step()
        return TrainStepResult(tuple(results))

    @scatter(merge)
    def measure_parity(self, track: RolloutTrack) -> Metrics:
        """Statistics of the importance ratio between the live weights and the recorded log-probs, place by place.

        A place is a denoising step, or all tokens of a response.
        """
        micros = [micro for update in self._split(track) for micro in update]
        return merge(parity_of(self.algorithm, self.stage, self._placed(micro)) for micro in micros)

    def _split(self, track: RolloutTrack) -> list[Update]:
        """Split the rows into updates and micro-batches. Update u of U is the rows [u B / U, (u + 1) B / U)."""
        num_rows, num_updates = len(track), self.num_updates_per_batch
        if num_rows % num_updates:
            legal = [u for u in range(1, num_rows + 1) if num_rows % u == 0][:12]
            raise GeometryError(
                f"stack.num_updates_per_batch={num_updates} does not divide the {num_rows} rows of this worker. "
                f"Use one of {', '.join(map(str, legal))}"
            )
        if not self.algorithm.parts(track.segment):
            raise IncompatibleError(
                f"{type(self.algorithm).__name__} has nothing to train: the rollout recorded no stochastic step. "
                "Choose a kernel with a density, and set sampling.sde_steps to at least one step"
            )
        size = num_rows // num_updates
        updates = [track.slice(u * size, (u + 1) * size) for u in range(num_updates)]
        if self.micro_batch_tokens is not None:
            return self._by_tokens(updates, self.micro_batch_tokens)
        return [rows.chunk(self.micro_batch_size) for rows in updates]

    def _by_tokens(self, updates: list[RolloutTrack], budget: int) -> list[Update]:
        """Split each update into micro-batches of at most `budget` tokens.

        This is a collective: all ranks get the same number of micro-batches.
        """
        costs = [self._costs(rows) for rows in updates]
        together = self.algorithm.needs.rows_together
        micros = [within_budget(each, budget, together) for each in costs]
        counts = current().max_over_dp([len(each) for each in micros])
        return [
            [_micro(rows, piece) for piece in as_many(pieces, count, cost, together)]
            for rows, pieces, count, cost in zip(updates, micros, counts, costs, strict=True)
        ]

    def _costs(self, rows: RolloutTrack) -> list[int]:
        costs = rows.costs()
        if costs is None:
            raise IncompatibleError(
                f"stack.micro_batch_tokens={self.micro_batch_tokens}: {type(rows.segment).__name__} holds no tokens, "
                "so every row costs the same. Use stack.micro_batch_size"
            )
        return costs.tolist()

    def _prepare(self, updates: list[Update]) -> Metrics:
        """Run the anchor pass, which fills the segments of `updates` in place, and return its parity metrics.

        The pass runs before any update, while no autograd graph is alive. The first update uses the detached values of
        its own forward pass as live anchors, so only later updates need measured ones, unless the loss uses totals.
        """
        metrics: list[Metrics] = []
        for snapshot in sorted({anchor.snapshot for anchor in self.algorithm.anchors().values()}):
            first = 1 if snapshot == "live" and not self.algorithm.needs.totals else 0
            with torch.no_grad(), self.backend.weights(snapshot):
                for micros in updates[first:]:
                    for i, micro in enumerate(micros):
                        segment, parity = self.algorithm.prepare_segment(self.stage, self._placed(micro), snapshot)
                        micros[i] = micro.replace(segment=micro.segment.replace(anchors=segment.anchors))
                        metrics.append(parity)
        return merge(metrics)

    def _with_totals(self, updates: list[Update], now: TrainingProgress) -> TrainingProgress:
        """Add the algorithm's totals over all rows of the step and all ranks to `now`: a collective if it has any."""
        if not self.algorithm.needs.totals:
            return now
        own = [self.algorithm.totals(self._placed(micro), now) for micros in updates for micro in micros]
        rank = current()
        return replace(now, totals=tuple(rank.sum_over_dp(total) for total in torch.stack(own).sum(0).tolist()))

    def _update(self, micros: Update, now: TrainingProgress, first: bool) -> Metrics:
        """One optimizer update over `micros`."""
        rank = current()
        count = rank.sum_over_dp(sum(self.algorithm.count(micro) for micro in micros))
        if count == 0:
            # Every rank sees the same count, so all ranks return here together.
            return {"train/skipped_updates": Metric.sum(1.0)}
        losses = _Losses(self.backend, 1.0 / count)
        metrics: list[Metrics] = []
        for i, micro in enumerate(micros):
            losses.last_rows = i == len(micros) - 1
            micro_metrics = self.algorithm.compute_loss_and_backward(
                self.stage, self._placed(micro), losses.backward, now, first_update=first
            )
            metrics.append(_widened(micro_metrics))
        stats = self.backend.step(self.max_grad_norm, losses.total)
        self._check_finite(stats, losses.total)
        if stats.skipped:
            return _update_metrics(stats)
        # The losses of the ranks add up. A mean metric of weight 1 / dp on each rank merges to their sum.
        loss = Metric(losses.total, 1.0 / rank.dp_size, "mean")
        return _update_metrics(stats) | {"train/loss": loss} | merge(metrics)

    def _placed(self, micro: RolloutTrack) -> RolloutTrack:
        return micro.to(self.backend.device)

    def _check_finite(self, stats: UpdateStats, loss: Tensor) -> None:
        if stats.skipped_in_a_row >= self.max_nonfinite_updates:
            raise DivergenceError(
                f"{stats.skipped_in_a_row} updates in a row were not finite (after update {self.backend.updates}; loss "
                f"{float(loss):g}, gradient norm {stats.grad_norm:g}, first in {stats.culprit}). None of them was "
                "applied. Lower optimizer_cfg.learning_rate or algorithm.clip_range, and look at the rewards of the "
                "last steps. Raise `stack.max_nonfinite_updates` to tolerate more."
            )


def _micro(rows: RolloutTrack, piece: Micro) -> RolloutTrack:
    chosen = rows.select(piece.rows)
    return chosen.replace(weight=torch.zeros_like(chosen.weight)) if piece.is_fill else chosen


class _Losses:
    """Scales the losses of one update, passes them to the backend, and adds them up.

    `last_rows` is set before the last micro-batch, so that the backend knows which backward pass is the last.
    """

    def __init__(self, backend: TrainBackend, scale: float) -> None:
        self.backend = backend
        self.scale = scale
        self.last_rows = False
        self.total = torch.zeros((), device=backend.device, dtype=torch.float64)

    def backward(self, loss: Tensor, last_part: bool) -> None:
        scaled = loss * self.scale
        self.total += scaled.detach()
        self.backend.backward(scaled, last=self.last_rows and last_part)


def _update_metrics(stats: UpdateStats) -> Metrics:
    """Learning rate, skip count and gradient norms of an update. A skipped update has no norms."""
    metrics = {"train/lr": Metric.mean(stats.lr), "train/skipped_updates": Metric.sum(float(stats.skipped))}
    if stats.skipped:
        return metrics
    norms = {"train/grad_norm": stats.grad_norm, "train/value_grad_norm": stats.value_grad_norm}
    return metrics | {name: Metric.mean(norm) for name, norm in norms.items() if norm is not None}


def _widened(metrics: Metrics) -> Metrics:
    """Convert metrics to float64, so that sums do not depend on how rows are spread over micro-batches and ranks."""
    return {
        name: Metric(_double(m.total), _double(m.weight), m.kind, _double(m.squares)) for name, m in metrics.items()
    }


def _double(value: Tensor | float) -> Tensor | float:
    return value.double() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Micro:
    """The rows of one micro-batch."""

    rows: tuple[int, ...]
    is_fill: bool = False
    """True for a copy of another micro-batch at weight 0. Copies make the number of forwards equal on all ranks."""


def within_budget(costs: Sequence[int], budget: int, together: int) -> list[Micro]:
    """Pack rows into few micro-batches of at most `budget`, by first-fit decreasing. A larger bundle is packed alone.

    The number of micro-batches is at most 11/9 of the minimum, plus one.

    Args:
        costs: the cost of each row, >= 0.
        budget: the largest total cost of a micro-batch.
        together: number of adjacent rows that form a bundle. A bundle is never split.
    """
    bundles = [tuple(range(start, start + together)) for start in range(0, len(costs), together)]
    price = {bundle: sum(costs[row] for row in bundle) for bundle in bundles}
    packed: list[list[tuple[int, ...]]] = []
    spent: list[int] = []
    for bundle in sorted(bundles, key=lambda each: (-price[each], each)):
        place = next((i for i, cost in enumerate(spent) if cost + price[bundle] <= budget), len(packed))
        if place == len(packed):
            packed.append([])
            spent.append(0)
        packed[place].append(bundle)
        spent[place] += price[bundle]
    return [Micro(tuple(sorted(row for bundle in micro for row in bundle))) for micro in packed]


def as_many(micros: Sequence[Micro], count: int, costs: Sequence[int], together: int) -> list[Micro]:
    """Turn the micro-batches into exactly `count`.

    The costliest micro-batch that holds more than one bundle is halved until there are enough. When every micro-batch
    is a single bundle, copies of the cheapest one at weight 0 fill up the number.
    """
    pieces = list(micros)
    while len(pieces) < count:
        largest = max(pieces, key=lambda micro: (len(micro.rows) > together, _cost(micro, costs)))
        if len(largest.rows) <= together:
            break
        half = len(largest.rows) // together // 2 * together
        at = pieces.index(largest)
        pieces[at : at + 1] = [Micro(largest.rows[:half]), Micro(largest.rows[half:])]
    cheapest = min(pieces, key=lambda micro: _cost(micro, costs))
    return [*pieces, *[Micro(cheapest.rows, is_fill=True)] * (count - len(pieces))]


def _cost(micro: Micro, costs: Sequence[int]) -> int:
    return sum(costs[row] for row in micro.rows)
