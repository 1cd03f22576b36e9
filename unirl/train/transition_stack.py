"""Trains on single decisions of episodes: several passes over minibatches of a step, as PPO does for control."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from msgspec import Meta
from torch import Tensor

from unirl.algorithms.ar_ppo import TokenCritic
from unirl.algorithms.base import START, StageAlgorithm
from unirl.config.errors import IncompatibleError
from unirl.distributed import current
from unirl.distributed.group.dispatch import scatter
from unirl.sde.noise import key_seed
from unirl.train.element_values import ElementValues
from unirl.train.normalization import RunningStatistics
from unirl.train.stack import PreparedStep, TrainStack, merge_ranks
from unirl.types.batch import take_rows, tensors_of
from unirl.types.device import to_device
from unirl.types.facts import ModelFacts
from unirl.types.protocols import TrainingProgress
from unirl.types.results import Metrics, TrainStepResult, merge
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment, PackedSegment

COPIED_BYTES = 2**28
"""Minibatches are copied from the decisions of a step in blocks of at most this many bytes, or one at a time."""


@dataclass(eq=False)
class TransitionStack(TrainStack):
    """Anchors and credit of all rows first; then `epochs` passes over their decisions, in minibatches.

    An update trains `minibatch_size` decisions, over all devices. Each device permutes its own rows, so another number
    of devices makes other minibatches.
    """

    toy: ClassVar[Mapping[str, object]] = {"minibatch_size": 16, "epochs": 2}
    trains: ClassVar[type] = TokenCritic
    normalizes: ClassVar[bool] = True

    _: KW_ONLY
    epochs: Annotated[int, Meta(ge=1)] = 10
    """Passes over the decisions of a step."""
    minibatch_size: Annotated[int, Meta(ge=1)] = 64
    """Decisions of an update, over all devices."""
    forward_decisions: Annotated[int, Meta(ge=1)] | None = None
    """Decisions of one forward on each device, for networks that cannot read a minibatch at once. null: all of it."""
    normalize_rewards: bool = False
    """Divide rewards by the running std of their discounted sum. Reported returns stay as the environment gave them."""

    @classmethod
    def check_recipe(cls, loss: type[StageAlgorithm[Any]], settings: Mapping[str, object], num_ranks: int) -> None:
        super().check_recipe(loss, settings, num_ranks)
        if settings["num_updates_per_batch"] != 1:
            raise IncompatibleError(
                f"stack.num_updates_per_batch={settings['num_updates_per_batch']}: this stack cuts a step into "
                "minibatches by itself. Leave it out, and set stack.epochs and stack.minibatch_size"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.credit = cast(TokenCritic, self.algorithm)
        self.statistics = self._statistics()
        if self.statistics is not None:
            self.backend.keep("statistics", self.statistics)

    def _statistics(self) -> RunningStatistics | None:
        """Running statistics of what the policy normalizes and of rewards; None if nothing is followed."""
        facts: ModelFacts = self.stage.facts
        if not (facts.normalized or self.normalize_rewards):
            return None
        return RunningStatistics(facts.normalized, self.normalize_rewards)

    @scatter(merge_ranks, unread=("decoded",))
    def train_track(
        self, track: RolloutTrack, now: TrainingProgress = START, shown: Collection[str] = ()
    ) -> TrainStepResult:
        """Train on all decisions of `track`. The result has one entry of metrics per update.

        The log-ratios of `shown` samples are those of the last pass over their decisions.
        """
        statistics, seen = self.statistics, track
        if statistics is not None and statistics.rewards is not None:
            track = self._scaled(track, statistics)
        work = self.prepare(track, now, is_first=False)
        values = ElementValues(shown)
        rows = self._credited(work)
        size = max(self.minibatch_size // current().dp_size, 1)
        counted = torch.nonzero(counted_elements(rows).cpu())[:, 0]
        # Every rank makes as many updates as the one with the most decisions.
        [count] = current().max_over_dp([-(-len(counted) // size)])
        nothing = single_elements(rows, counted[:0])
        results: list[Metrics] = []
        width, at_once = self.forward_decisions or size, minibatches_at_once(rows, size)
        for epoch in range(self.epochs):
            seed = key_seed(self.backend.seed, f"minibatches{self.backend.updates}")
            order = counted[permutation(len(counted), seed)]
            for i in range(count):
                if i % at_once == 0:  # a slice of many minibatches takes less time than a selection for each
                    first = i * size
                    shuffled = single_elements(rows, order[first : first + at_once * size])
                # Every rank makes as many forwards, so a short minibatch ends in parts without a decision.
                starts = range(i * size, (i + 1) * size, width)
                spans = [(start, min(start + width, starts.stop, len(order))) for start in starts]
                parts = [
                    shuffled.slice(start - first, stop - first) if start < stop else nothing for start, stop in spans
                ]
                places = [order[start:stop] for start, stop in spans]
                watch = values.watch_places(rows, places) if epoch == self.epochs - 1 else None
                results.append(self.update(parts, work.now, first=not results, watch=watch))
        results[0] = merge([results[0], work.parity])
        if statistics is not None:  # The updates need the statistics of the policy that acted.
            acted = seen.sampled_as(ActionSegment)
            self.backend.assign(statistics.see(acted.segment, counted_elements(acted)))
        self.backend.finish_step()
        return TrainStepResult(tuple(results), values.by_sample())

    def _credited(self, work: PreparedStep) -> RolloutTrack[PackedSegment]:
        """All rows of a step with their credit, on the device that trains."""
        placed = [self._placed(micro).sampled_as(PackedSegment) for micro in work.updates[0]]
        return RolloutTrack.concat([self.credit.credited(micro, work.now) for micro in placed])

    def _scaled(self, track: RolloutTrack, statistics: RunningStatistics) -> RolloutTrack:
        rows = track.sampled_as(ActionSegment)
        rewards = statistics.scaled_rewards(rows.segment, counted_elements(rows), self.credit.gamma)
        return track.replace(segment=rows.segment.replace(rewards=rewards))


def counted_elements(rows: RolloutTrack[PackedSegment]) -> Tensor:
    """[sum L] bool, elements of rows of weight > 0 that are not context."""
    segment = rows.segment
    lengths = to_device(segment.lengths, segment.loss_mask.device)
    return segment.loss_mask & (rows.weight > 0).repeat_interleave(lengths, output_size=len(segment.loss_mask))


def minibatches_at_once(rows: RolloutTrack[PackedSegment], size: int) -> int:
    """The number of minibatches of `size` elements whose copy has at most COPIED_BYTES, and at least one."""
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(rows.segment.packed_fields()))
    return max(COPIED_BYTES * max(len(rows.segment.loss_mask), 1) // max(num_bytes * size, 1), 1)


def permutation(count: int, seed: int) -> Tensor:
    """A random order of 0 .. count - 1 that depends on the seed alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def single_elements(rows: RolloutTrack[PackedSegment], chosen: Tensor) -> RolloutTrack:
    """A track whose rows are single elements of packed rows.

    Args:
        chosen: [n] positions in the packed fields, on the CPU. With none, the result is one element of weight 0.
    """
    segment = rows.segment
    taken = chosen if len(chosen) else torch.zeros(1, dtype=torch.int64)
    row = torch.searchsorted(segment.offsets, taken, right=True) - 1
    packed = take_rows(segment.packed_fields(), taken)
    weight = take_rows(rows.weight, row) * float(bool(len(chosen)))
    ids = [rows.sample_ids[i] for i in row.tolist()]
    return RolloutTrack(
        sample_ids=ids,
        group_ids=ids,
        conditions={name: condition.select(row.tolist()) for name, condition in rows.conditions.items()},
        segment=segment.replace(
            **packed, offsets=torch.arange(len(taken) + 1), finished=take_rows(segment.finished, row)
        ),
        weight=weight,
        weight_version=take_rows(rows.weight_version, row),
    )
