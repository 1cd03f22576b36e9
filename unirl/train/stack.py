"""Trains one backend with one loss: divides rows into updates and micro-batches, and runs the anchor pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from unirl.algorithms.base import START, StageAlgorithm
from unirl.algorithms.shared.contract import count_of, parts_of
from unirl.config.errors import DivergenceError, GeometryError, IncompatibleError, InvalidValueError
from unirl.distributed import current
from unirl.distributed.group.dispatch import broadcast, collect, scatter
from unirl.train.backend.base import TrainBackend, UpdateStats
from unirl.train.element_values import ElementValues, Watch
from unirl.train.memory import DeviceMemory, MicroBatchMemory, memory_of, peak_bytes
from unirl.train.parity import parity_of
from unirl.types.device import CPU
from unirl.types.facts import ModelFacts
from unirl.types.progress import progress
from unirl.types.protocols import REFERENCE, TrainingProgress
from unirl.types.results import Metric, Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import Sampling

Update = list[RolloutTrack]
"""The micro-batches of one update, in order."""


@dataclass(frozen=True)
class PreparedStep:
    """The rows of a step, ready to be trained."""

    updates: list[Update]
    now: TrainingProgress
    parity: Metrics
    """Metrics of the difference between the recorded log-probs and those of the anchor pass."""
    values: ElementValues
    """Collects the values of samples that are shown to people."""


def merge_ranks(results: Sequence[TrainStepResult]) -> TrainStepResult:
    """Merge the results of all ranks, update by update."""
    updates = tuple(merge(ranks) for ranks in zip(*(r.updates for r in results), strict=True))
    return TrainStepResult(updates, {name: series for r in results for name, series in r.series.items()})


def joined(results: Sequence[list[MicroBatchMemory]]) -> list[MicroBatchMemory]:
    """The measurements of all ranks."""
    return [each for rank in results for each in rank]


@dataclass(eq=False)
class TrainStack:
    """Trains a track: anchors -> for each update: for each micro-batch: for each part: backward -> step.

    An algorithm returns losses as sums over elements. Each update divides them once, by its number of elements over all
    ranks, so the gradient does not depend on how rows are cut into micro-batches and parts. Every rank runs the same
    number of micro-batches.
    """

    toy: ClassVar[Mapping[str, object]] = {"micro_batch_size": 2}
    trains: ClassVar[type] = StageAlgorithm
    """The losses that this kind of stack can train."""
    normalizes: ClassVar[bool] = False
    """Updates the running statistics of observations."""
    trains_rows: ClassVar[bool] = True
    """The loss gets the rows of a step. False: transitions of a replay store."""

    backend: TrainBackend
    algorithm: StageAlgorithm[Any]
    stage: Any
    """The policy that the algorithm replays. Only the algorithm knows its type."""
    _: KW_ONLY
    micro_batch_size: int | Literal["auto"] = "auto"
    """Number of rows per forward and backward pass. It changes memory and speed, not the gradient.

    A run with the word "auto" takes what its plan chooses for the memory of the device; on a GPU, a measurement before
    the first update may lower it. A continued run takes the number of the first one.
    """
    micro_batch_tokens: int | None = None
    """Replaces `micro_batch_size` for rows of unequal length.

    A micro-batch holds whole rows with at most this many prompt and response tokens. A longer row forms a micro-batch
    by itself.
    """
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The gradient is clipped to this norm before each update."""
    num_updates_per_batch: int = 1
    """Number of optimizer updates per rollout. Each update uses different rows."""
    max_nonfinite_updates: int = 3
    """Stop the run after this many consecutive updates whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        self._check_settings()
        # Until the driver has chosen, "auto" is the smallest legal size.
        fixed, together = self.micro_batch_size, self.algorithm.needs.rows_together
        self.micro_rows = fixed if isinstance(fixed, int) else together
        """Rows of a micro-batch."""
        for name in self.algorithm.needs.snapshots:
            self._provide_snapshot(name)
        if self.algorithm.needs.value:
            self.stage.value_head = self.backend.provide_value_head(partial(self.algorithm.build_head, self.stage))

    @classmethod
    def check_recipe(cls, loss: type[StageAlgorithm[Any]], settings: Mapping[str, object], num_ranks: int) -> None:
        """Refuses a loss and settings that this kind of stack cannot train, before any of them is built.

        Args:
            settings: the block `stack`, with its defaults.
            num_ranks: devices that train.

        Raises:
            ConfigError: 2020, or 2004 for a setting out of range.
        """
        if cls.trains_rows and not loss.trains_on_rows:
            raise IncompatibleError(
                f"algorithm: {loss.__name__} trains on transitions of a replay store, and {cls.__name__} trains on "
                "rows. Set stack._target_=unirl.train.replay_stack.ReplayStack"
            )
        if not issubclass(loss, cls.trains):
            raise IncompatibleError(
                f"stack: {cls.__name__} trains losses of the kind {cls.trains.__name__}, and algorithm is "
                f"{loss.__name__}. Set stack._target_=unirl.train.stack.TrainStack, or take a loss of "
                f"{cls.trains.__module__}"
            )

    @classmethod
    def check_data(
        cls, loss: StageAlgorithm[Any], facts: ModelFacts, sampling: Sampling, settings: Mapping[str, object]
    ) -> None:
        """Refuses data of the stack's own that do not fit the loss or the model. By default, a stack has none.

        Args:
            settings: the block `stack`, with its defaults.

        Raises:
            ConfigError: a setting does not fit the loss or the model.
            DataError: the data are missing, or do not fit the model.
            DependencyError: 3001, the library that reads them is missing.
        """
        return None

    @classmethod
    def check_facts(cls, facts: ModelFacts) -> None:
        """Raises IncompatibleError (2020) if this kind of stack cannot train a model with these facts."""
        if facts.normalized and not cls.normalizes:
            raise IncompatibleError(
                f"bundle.normalize=true: {cls.__name__} does not follow the statistics of observations. Leave out "
                "bundle.normalize, or set stack._target_=unirl.train.transition_stack.TransitionStack"
            )

    def _check_settings(self) -> None:
        self.check_recipe(type(self.algorithm), vars(self), current().dp_size)
        for name in ("micro_batch_size", "micro_batch_tokens", "num_updates_per_batch", "max_nonfinite_updates"):
            if vars(self)[name] not in (None, "auto") and vars(self)[name] < 1:
                raise InvalidValueError(f"stack.{name} must be >= 1, got {vars(self)[name]}")
        if self.max_grad_norm <= 0:
            raise InvalidValueError(f"stack.max_grad_norm must be > 0, got {self.max_grad_norm}")
        needs, name = self.algorithm.needs, type(self.algorithm).__name__
        if self.num_updates_per_batch > 1 and not needs.multi_update:
            raise IncompatibleError(
                f"stack.num_updates_per_batch={self.num_updates_per_batch}: {name} is valid only for one update per "
                "rollout. Use 1"
            )
        fixed = self.micro_batch_size if self.micro_batch_tokens is None else "auto"
        if isinstance(fixed, int) and fixed % needs.rows_together:
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

    @scatter(merge_ranks, unread=("decoded",))
    def train_track(
        self, track: RolloutTrack, now: TrainingProgress = START, shown: Collection[str] = ()
    ) -> TrainStepResult:
        """Train on all rows of `track`. The result has one entry of metrics per update.

        Args:
            shown: the ids of the samples whose values along the sample are returned, too (`ElementValues`).
        """
        work = self.prepare(track, now, shown=shown)
        results = [
            self.update(micros, work.now, first=u == 0, watch=work.values.watch)
            for u, micros in enumerate(work.updates)
        ]
        results[0] = merge([results[0], work.parity])
        self.backend.finish_step()
        return TrainStepResult(tuple(results), work.values.by_sample())

    def prepare(
        self, track: RolloutTrack, now: TrainingProgress = START, is_first: bool = True, shown: Collection[str] = ()
    ) -> PreparedStep:
        """The updates of a step, with their anchors. It comes before the first update of any loss on these weights.

        Args:
            is_first: the first update of this track is the first one on these weights in the step.
            shown: the ids of the samples whose values are collected.
        """
        updates = self._split(track)
        parity = self._prepare(updates, own_anchors=int(is_first))
        return PreparedStep(updates, self._with_totals(updates, now), parity, ElementValues(shown))

    @scatter(merge, unread=("decoded",))
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
        if not parts_of(self.algorithm, track.segment):
            raise IncompatibleError(
                f"{type(self.algorithm).__name__} has nothing to train: the rollout recorded no stochastic step. "
                "Choose a kernel with a density, and set sampling.sde_steps to at least one step"
            )
        size = num_rows // num_updates
        updates = [track.slice(u * size, (u + 1) * size) for u in range(num_updates)]
        if self.micro_batch_tokens is not None:
            return self._by_tokens(updates, self.micro_batch_tokens)
        return [rows.chunk(self.micro_rows) for rows in updates]

    # stack.micro_batch_size=auto

    @collect
    def device_memory(self) -> DeviceMemory:
        """The device of each rank."""
        return memory_of(self.backend.device)

    @broadcast
    def use_micro_rows(self, rows: int) -> None:
        """Cut updates into micro-batches of `rows` rows from now on."""
        self.micro_rows = rows

    @scatter(joined, unread=("decoded",))
    def measure_memory(self, track: RolloutTrack, now: TrainingProgress = START) -> list[MicroBatchMemory]:
        """The memory that micro-batches of the costliest rows take on each rank's device, which must not be a CPU.

        Trains a quarter and a half of the present micro-batch, but at least one and two bundles of rows, and drops the
        gradients, so no weight changes. `micro_rows` and the rows of each rank are at least two bundles. This is a
        collective.
        """
        together = self.algorithm.needs.rows_together
        many = max(self.micro_rows // (2 * together), 2) * together
        few = many // (2 * together) * together
        rows = self._costliest(track, many)
        # The first pass allocates workspaces, some of which it frees.
        _, low, high = (
            peak_bytes(self.backend.device, partial(self._try, rows.slice(0, size), now)) for size in (few, few, many)
        )
        current().free_unused()
        return [MicroBatchMemory((few, many), (low, high))]

    def _costliest(self, track: RolloutTrack, count: int) -> RolloutTrack:
        """The `count` rows with the most tokens, whole bundles; the first rows if all cost the same."""
        together, costs = self.algorithm.needs.rows_together, track.costs()
        starts = list(range(0, len(track), together))
        if costs is not None:
            starts.sort(key=lambda start: -int(costs[start : start + together].sum()))
        return track.select([start + i for start in starts[: count // together] for i in range(together)])

    def _try(self, rows: RolloutTrack, now: TrainingProgress) -> None:
        """Compute the gradient of one micro-batch as an update would, and drop it."""
        updates = [[rows]]
        self._prepare(updates)
        now, [[micro]] = self._with_totals(updates, now), updates
        total = torch.zeros((), device=self.backend.device, dtype=torch.float64)
        backward = partial(self._backward, total, 1.0, True)
        self.algorithm.compute_loss_and_backward(self.stage, self._placed(micro), backward, now, first_update=True)
        progress("micro-batch that is measured")
        self.backend.drop_gradients()

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

    def _prepare(self, updates: list[Update], own_anchors: int = 1) -> Metrics:
        """Run the anchor pass, which fills the segments of `updates` in place, and return its parity metrics.

        The pass runs before any update, while no autograd graph is alive. The first update uses the detached values of
        its own forward pass as live anchors, so only later updates need measured ones, unless the loss uses totals.

        Args:
            own_anchors: the number of updates whose forward passes run on the weights that sampled.
        """
        metrics: list[Metrics] = []
        for snapshot in sorted({anchor.snapshot for anchor in self.algorithm.anchors().values()}):
            first = own_anchors if snapshot == "live" and not self.algorithm.needs.totals else 0
            with torch.no_grad(), self.backend.weights(snapshot):
                total = sum(map(len, updates[first:]))
                for micros in updates[first:]:
                    for i, micro in enumerate(micros):
                        progress("anchors of a micro-batch", total)
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

    def update(self, micros: Update, now: TrainingProgress, first: bool, watch: Watch | None = None) -> Metrics:
        """One optimizer update over `micros`."""
        count = self.count(micros)
        if count == 0:
            # Every rank sees the same count, so all ranks return here together.
            return {"train/skipped_updates": Metric.sum(1.0)}
        total, metrics = self.accumulate(micros, now, first, 1.0 / count, watch=watch)
        return self.step(total, metrics)

    def count(self, micros: Update) -> float:
        """The weighted number of elements of an update, over all ranks. This is a collective."""
        return current().sum_over_dp(sum(count_of(self.algorithm, micro) for micro in micros))

    def accumulate(
        self,
        micros: Update,
        now: TrainingProgress,
        first: bool,
        scale: float,
        is_last: bool = True,
        watch: Watch | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Add the gradient of an update, and return its scaled loss on this rank, [] float64, with its metrics.

        Args:
            first: the weights are those that sampled the rows.
            scale: the factor of the sum of losses.
            is_last: no further gradient is added before the optimizer steps.
            watch: says who observes the values of a micro-batch. None: nobody.
        """
        total = torch.zeros((), device=self.backend.device, dtype=torch.float64)
        metrics: list[Metrics] = []
        for i, micro in enumerate(micros):
            backward = partial(self._backward, total, scale, is_last and i == len(micros) - 1)
            observe = None if watch is None else watch(i, micro)
            micro_metrics = self.algorithm.compute_loss_and_backward(
                self.stage, self._placed(micro), backward, now, first_update=first, observe=observe
            )
            metrics.append({name: metric.double() for name, metric in micro_metrics.items()})
            progress("micro-batch", len(micros))
        return total, merge(metrics)

    def step(self, total: Tensor, metrics: Metrics) -> Metrics:
        """Update the weights by the gradient that was added. Returns `metrics` with those of the update.

        Args:
            total: [] float64 the loss on this rank.

        Raises:
            DivergenceError: too many updates in a row were not finite.
        """
        stats = self.backend.step(self.max_grad_norm, total)
        self._check_finite(stats, total)
        return update_metrics(stats) if stats.skipped else update_metrics(stats) | loss_metric(total) | metrics

    def _backward(self, total: Tensor, scale: float, last_rows: bool, loss: Tensor, last_part: bool) -> None:
        """Scale the loss of one part, add it to `total` in place, and pass it to the backend."""
        scaled = loss * scale
        total += scaled.detach()
        self.backend.backward(scaled, last=last_rows and last_part)

    def _placed(self, micro: RolloutTrack) -> RolloutTrack:
        return micro if self.backend.device == CPU else micro.to(self.backend.device)

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


def loss_metric(total: Tensor) -> Metrics:
    """The loss of an update as a metric. `total` [] is this rank's share of it."""
    # The losses of the ranks add up. A mean metric of weight 1 / dp on each rank merges to their sum.
    return {"train/loss": Metric(total, 1.0 / current().dp_size, "mean")}


def update_metrics(stats: UpdateStats) -> Metrics:
    """Learning rate, skip count and gradient norms of an update. A skipped update has no norms."""
    metrics = {"train/lr": Metric.mean(stats.lr), "train/skipped_updates": Metric.sum(float(stats.skipped))}
    if stats.skipped:
        return metrics
    norms = {"train/grad_norm": stats.grad_norm, "train/value_grad_norm": stats.value_grad_norm}
    return metrics | {name: Metric.mean(norm) for name, norm in norms.items() if norm is not None}


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
