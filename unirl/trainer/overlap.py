"""Generation and scoring at the same time: the reward scores one part while the engine generates the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unirl.distributed.group.handle import PendingCall, submit
from unirl.reward.service import RewardService, concat_scored
from unirl.rollout.engine.base import RolloutEngine
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


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


@dataclass
class OverlappedScoring:
    """Scores the first parts of a request while the engine generates the rest. The parts change no score."""

    rollout: RolloutEngine
    reward: RewardService
    parts: int
    generated_at: list[float] = field(default_factory=list)
    """When each part was generated, in seconds of a monotonic clock."""
    pending: list[PendingCall[RolloutResp]] = field(default_factory=list)
    """The parts that are being scored: all but the last."""
    last: tuple[RolloutReq, RolloutResp] | None = None

    def generate(self, req: RolloutReq) -> None:
        """Generate all samples. Each part but the last is sent to the reward as soon as it is generated."""
        self.generated_at, self.pending, self.last = [], [], None
        for part in in_parts(req, self.parts):
            if self.last is not None:
                self.pending.append(submit(self.reward.score_and_attach, *self.last))
            self.last = (part, self.rollout.generate(part))
            self.generated_at.append(time.perf_counter())

    def scores(self) -> tuple[RolloutResp, dict[str, float]]:
        """The scored samples in the order of the request, and with several parts the metrics of the reward's queue."""
        assert self.last is not None, "generate comes before scores"
        begin = time.perf_counter()
        scored = [pending.result() for pending in self.pending]
        scored.append(self.reward.score_and_attach(*self.last))
        waited = time.perf_counter() - begin
        busy = [seconds_of(resp) for resp in scored]
        return concat_scored(scored), queue_metrics(self.generated_at, busy, waited) if len(scored) > 1 else {}


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
