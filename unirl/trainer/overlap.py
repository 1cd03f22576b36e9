"""Generation and scoring at the same time: the reward scores one part while the engine generates the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from unirl.distributed.group.handle import PendingCall, submit
from unirl.reward.service import RewardService, concat_scored
from unirl.rollout.engine.base import RolloutEngine
from unirl.trainer.part_sampling import PartSampling, SampledPart
from unirl.trainer.requests import check_versions
from unirl.trainer.slices import sampled_in_slices
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp

TimedTurn = Callable[[RolloutReq, str], AbstractContextManager[RolloutReq]]
"""Has the engine for a request in its block, and yields it with the weights that the engine has. Also given the name of
the timer of the block."""


def in_parts(req: RolloutReq, count: int) -> list[RolloutReq]:
    """The request in at most `count` consecutive parts of whole groups, as equal as can be.

    Raises ValueError when the rows of a group do not stand together.
    """
    starts = [row for row, group in enumerate(req.group_ids) if row == 0 or group != req.group_ids[row - 1]]
    if len(starts) != len(set(req.group_ids)):
        raise ValueError("the samples of a group are not adjacent, so a request cannot be divided between groups")
    count = min(count, len(starts))
    bounds = [starts[len(starts) * part // count] for part in range(count)] + [len(req)]
    return [req.slice(start, stop) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, kw_only=True)
class ScoringUnderWay:
    """A request that is generated, and its scores, some of which are there."""

    reward: RewardService
    numbers: Sequence[int]
    """The number of each part in the request, in the order in which the parts were generated."""
    generated_at: Sequence[float]
    """When each part was generated, in the same order, in seconds of a monotonic clock."""
    pending: Sequence[PendingCall[RolloutResp]]
    """The parts that are being scored, the first ones."""
    last: SampledPart | None
    """The last part, which is not scored yet. None if it is pending like the others."""

    def scores(self) -> tuple[RolloutResp, dict[str, float]]:
        """The scored samples in the order of the request, and with several parts the metrics of the reward's queue."""
        begin = time.perf_counter()
        scored = [pending.result() for pending in self.pending]
        if self.last is not None:
            scored.append(self.reward.score_and_attach(*self.last))
        waited = time.perf_counter() - begin
        busy = [seconds_of(resp) for resp in scored]
        in_order = [resp for _, resp in sorted(zip(self.numbers, scored, strict=True), key=lambda each: each[0])]
        return concat_scored(in_order), queue_metrics(self.generated_at, busy, waited) if len(scored) > 1 else {}


@dataclass(frozen=True, kw_only=True)
class OverlappedScoring:
    """Scores the first parts of a request while the engine generates the rest. The parts change no score."""

    sampling: PartSampling
    reward: RewardService
    parts: int
    scores_at_once: bool
    """Score the last part, too, as soon as it is generated. Else it is scored when the scores are asked for."""
    slice_tokens: int | None = None
    """Tokens after which responses pause. None: they do not."""

    def generate(self, req: RolloutReq, turn: TimedTurn) -> ScoringUnderWay:
        """Generate all samples. Each part but the last is sent to the reward as soon as it is generated.

        Args:
            turn: has the engine for a part, times its work, and yields the part with the weights that the engine has.
        """
        parts = in_parts(req, self.parts)
        numbers: list[int] = []
        generated_at: list[float] = []
        pending: list[PendingCall[RolloutResp]] = []
        last: list[SampledPart] = []

        def score(number: int, sampled: SampledPart) -> None:
            numbers.append(number)
            generated_at.append(time.perf_counter())
            if self.scores_at_once or len(numbers) < len(parts):
                pending.append(submit(self.reward.score_and_attach, *sampled))
            else:
                last.append(sampled)

        self.sampling(parts, partial(self._sampled, turn), score)
        return ScoringUnderWay(
            reward=self.reward,
            numbers=numbers,
            generated_at=generated_at,
            pending=pending,
            last=last[0] if last else None,
        )

    def _sampled(self, turn: TimedTurn, part: RolloutReq, engine: RolloutEngine, timer: str) -> SampledPart:
        """The samples of a part, and the part with the weights that they come from."""
        if self.slice_tokens is not None:
            return sampled_in_slices(part, lambda slices: turn(slices, timer), engine, self.slice_tokens)
        with turn(part, timer) as sourced:
            resp = engine.generate(sourced)
        check_versions(sourced, resp)
        return sourced, resp


def seconds_of(resp: RolloutResp) -> float:
    """Seconds that the slowest rank of the reward worked on these samples, of which it scores track after track."""
    return sum(float(track.reward_seconds.max()) for track in resp.tracks.values() if track.reward_seconds is not None)


def queue_metrics(submitted: Sequence[float], busy: Sequence[float], waited: float) -> dict[str, float]:
    """Metrics of a queue with one worker, from the arrival and the duration of each part in seconds.

    `queue/reward_busy` is the share of the time from the first part's arrival to the last score.
    """
    done: list[float] = []
    free = 0.0
    for start, seconds in zip(submitted, busy, strict=True):
        free = max(start, free) + seconds  # a part waits for those before it
        done.append(free)
    depths = [sum(end > now for end in done[:part]) for part, now in enumerate(submitted)]
    return {
        "queue/reward_depth": float(max(depths)),
        "queue/reward_wait": waited,
        "queue/reward_latency": sum(end - start for start, end in zip(submitted, done, strict=True)) / len(done),
        "queue/reward_busy": sum(busy) / max(done[-1] - submitted[0], 1e-9),
    }
