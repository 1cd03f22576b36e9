"""What becomes of samples that cannot be scored: tried again, dropped with their group within a budget, or the end."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unirl.config.errors import InvalidValueError, RewardError
from unirl.reward.scoring import checked_score, joined, refuse_failures, scored_apart
from unirl.types.protocols import Scorer, State
from unirl.types.reward import Failure, RewardRequest, RewardResponse
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

SIBLING = "sibling"
"""The reason of a sample that was scored, and dropped because one of its group was not."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """A sample that cannot be scored is never a zero: by default the first one stops the run."""

    retries: int = 0
    """How often failed samples are scored again, by themselves, after the others of their call."""
    max_dropped_fraction: float = 0.0
    """Share of the samples of the last `window` steps that may be dropped, whole groups counted; beyond it: the end."""
    window: int = 20
    """Steps over which dropped samples are counted."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise InvalidValueError(f"on_failure.retries must be >= 0, got {self.retries}; 2 is usual")
        if not 0.0 <= self.max_dropped_fraction < 1.0:
            raise InvalidValueError(
                f"on_failure.max_dropped_fraction must lie in [0, 1), got {self.max_dropped_fraction}; 0.05 is usual, "
                "and 0 stops at the first sample that cannot be scored"
            )
        if self.window < 1:
            raise InvalidValueError(f"on_failure.window must be >= 1 step, got {self.window}; 20 is usual")

    def score(self, scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
        """The scorer's answer after all retries.

        Raises:
            RewardError: 6001 when the scorer cannot be reached; the first failure, if nothing may be dropped.
        """
        if self == STRICT:
            return checked_score(scorer, request, name)
        answer = scored_apart(scorer, request, name)
        for _ in range(self.retries):
            lost = answer.lost()
            if lost:
                answer = _replaced(answer, lost, scored_apart(scorer, request.select(lost), name))
        if not self.max_dropped_fraction:
            refuse_failures(answer, request)
        return answer


STRICT = FailurePolicy()


def _replaced(answer: RewardResponse, rows: Sequence[int], again: RewardResponse) -> RewardResponse:
    """The answer with that of another call at `rows`."""
    both = joined([answer, again])
    source = list(range(len(answer.total)))
    for number, row in enumerate(rows):
        source[row] = len(answer.total) + number
    return RewardResponse(
        total=both.total[source],
        components={name: scores[source] for name, scores in both.components.items()},
        logged_rewards={name: scores[source] for name, scores in both.logged_rewards.items()},
        failures={row: both.failures[of] for row, of in enumerate(source) if of in both.failures},
        answers=None if both.answers is None else [both.answers[of] for of in source],
    )


class DropBudget:
    """Drops the groups of samples without a reward, as long as `policy` allows. `Stateful`."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.counts: deque[tuple[int, int]] = deque(maxlen=policy.window)
        """(samples, dropped ones) of the last steps."""

    def admit(self, resp: RolloutResp) -> RolloutResp:
        """The response with weight 0 in every group that lost a sample.

        Raises:
            RewardError: 6002 when more were dropped than may be, or none is left.
        """
        admitted = drop_failed(resp)
        weights = torch.cat([track.weight for track in admitted.tracks.values() if track.rewards is not None])
        self.counts.append((len(weights), int((weights == 0).sum())))
        samples, dropped = (sum(column) for column in zip(*self.counts, strict=True))
        if dropped > self.policy.max_dropped_fraction * samples or not weights.any():
            raise RewardError(self._spent(admitted, samples, dropped))
        return admitted

    def _spent(self, resp: RolloutResp, samples: int, dropped: int) -> str:
        name, row, failure = first_failure(resp)
        reasons = Counter[str]()
        for track in resp.tracks.values():
            reasons.update(drop_reasons(track))
        found = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
        return (
            f"{dropped} of the {samples} samples of the last {len(self.counts)} steps were dropped, because they or "
            f"their siblings could not be scored; reward.on_failure.max_dropped_fraction allows "
            f"{self.policy.max_dropped_fraction:g}. In this step: {found}. The first is sample "
            f"{resp.tracks[name].sample_ids[row]!r}: {failure.why}"
        )

    def state_dict(self) -> State:
        return {"counts": [list(count) for count in self.counts]}

    def load_state_dict(self, state: State) -> None:
        self.counts.clear()
        self.counts.extend((samples, dropped) for samples, dropped in state["counts"])


def drop_failed(resp: RolloutResp) -> RolloutResp:
    """The response with weight 0 in every group of which a sample has no reward."""
    groups = set()
    for name, track in resp.tracks.items():
        if track.rewards is not None and not track.rewards.isfinite().all():
            roots = resp.root_groups(name)
            groups |= {roots[row] for row in (~track.rewards.isfinite()).nonzero().flatten().tolist()}
    return resp.drop(groups) if groups else resp


def drop_reasons(track: RolloutTrack) -> dict[str, int]:
    """How many samples of weight 0 fell for which reward, or for a sibling's sake."""
    failures = track.failures or [()] * len(track)
    alone = track.rewards.isfinite().tolist() if track.rewards is not None else [True] * len(track)
    return dict(
        Counter(
            SIBLING if scored else failures[row][0].reward
            for row, (weight, scored) in enumerate(zip(track.weight.tolist(), alone, strict=True))
            if weight == 0
        )
    )


def first_failure(resp: RolloutResp) -> tuple[str, int, Failure]:
    """(track, row, why) of the first sample without a reward."""
    for name, track in resp.tracks.items():
        if track.rewards is not None and track.failures is not None:
            for row, score in enumerate(track.rewards.tolist()):
                if not math.isfinite(score):
                    return name, row, track.failures[row][0]
    raise ValueError("every sample of this response has a reward")
