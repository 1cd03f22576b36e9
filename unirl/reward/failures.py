"""The policy for samples that cannot be scored: retry, then give weight 0 to their group within a budget, or stop."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unirl.config.errors import InvalidValueError, RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import checked_score, concat_responses, refuse_failures, score_by_halves
from unirl.types.protocols import State
from unirl.types.reward import RewardRequest, RewardResponse, ScoringFailure
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

SIBLING = "sibling"
"""The reason for weight 0 of a sample that has a reward, but is in the group of one that has none."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What happens when samples cannot be scored. By default the first one stops the run; it never counts as 0."""

    retries: int = 0
    """How often failed samples are scored again, by themselves, after the other samples of their call."""
    max_dropped_fraction: float = 0.0
    """Largest share of the samples of the last `window` steps that may have weight 0. A sample without a reward gives
    weight 0 to its whole group. The run stops beyond this share."""
    window: int = 20
    """Number of steps over which samples of weight 0 are counted."""

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

    def score(self, scorer: RewardScorer, request: RewardRequest, name: str) -> RewardResponse:
        """Returns the scorer's response after all retries.

        Raises:
            RewardError: 6001 when the scorer cannot be reached; the first failure when no sample may have weight 0.
        """
        if self == STRICT:
            return checked_score(scorer, request, name)
        response = score_by_halves(scorer, request, name)
        for _ in range(self.retries):
            failed = response.failed_rows()
            if failed:
                response = _replace_rows(response, failed, score_by_halves(scorer, request.select(failed), name))
        if not self.max_dropped_fraction:
            refuse_failures(response, request)
        return response


STRICT = FailurePolicy()


def _replace_rows(response: RewardResponse, rows: Sequence[int], retried: RewardResponse) -> RewardResponse:
    """Returns `response` with its rows `rows` replaced by those of `retried`."""
    both = concat_responses([response, retried])
    source = list(range(len(response.total)))
    for number, row in enumerate(rows):
        source[row] = len(response.total) + number
    return RewardResponse(
        total=both.total[source],
        components={name: scores[source] for name, scores in both.components.items()},
        logged_rewards={name: scores[source] for name, scores in both.logged_rewards.items()},
        failures={row: both.failures[index] for row, index in enumerate(source) if index in both.failures},
        answers=None if both.answers is None else [both.answers[index] for index in source],
    )


class DropBudget:
    """Gives weight 0 to the groups of samples without a reward, as far as `policy` allows. `Stateful`."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.counts: deque[tuple[int, int]] = deque(maxlen=policy.window)
        """(samples, samples of weight 0) of the last steps."""

    def admit(self, resp: RolloutResp) -> RolloutResp:
        """Returns the response with weight 0 for every group that has a sample without a reward.

        Raises:
            RewardError: 6002 when the policy does not allow so many samples of weight 0, or no other sample is left.
        """
        admitted = drop_failed(resp)
        weights = torch.cat([track.weight for track in scored_tracks(admitted)])
        self.counts.append((len(weights), int((weights == 0).sum())))
        samples, dropped = (sum(column) for column in zip(*self.counts, strict=True))
        if dropped > self.policy.max_dropped_fraction * samples or not weights.any():
            raise RewardError(self._overdrawn(admitted, samples, dropped))
        return admitted

    def _overdrawn(self, resp: RolloutResp, samples: int, dropped: int) -> str:
        name, row, failure = first_failure(resp)
        reasons = sum((drop_reasons(track) for track in scored_tracks(resp)), Counter[str]())
        counts = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
        return (
            f"{dropped} of the {samples} samples of the last {len(self.counts)} steps were dropped, because they or "
            f"their siblings could not be scored; reward.on_failure.max_dropped_fraction allows "
            f"{self.policy.max_dropped_fraction:g}. In this step: {counts}. The first is sample "
            f"{resp.tracks[name].sample_ids[row]!r}: {failure.why}"
        )

    def state_dict(self) -> State:
        return {"counts": [list(count) for count in self.counts]}

    def load_state_dict(self, state: State) -> None:
        self.counts.clear()
        self.counts.extend((samples, dropped) for samples, dropped in state["counts"])


def scored_tracks(resp: RolloutResp) -> list[RolloutTrack]:
    """Returns the tracks that a reward scored, each with the scores of the rows above."""
    return [resp.with_scores_above(name) for name, track in resp.tracks.items() if track.rewards is not None]


def drop_failed(resp: RolloutResp) -> RolloutResp:
    """Returns the response with weight 0 for every group that has a sample without a reward. No row is removed."""
    groups = set()
    for name, track in resp.tracks.items():
        if track.rewards is not None and not track.rewards.isfinite().all():
            roots = resp.root_groups(name)
            groups |= {roots[row] for row in (~track.rewards.isfinite()).nonzero().flatten().tolist()}
    return resp.drop(groups) if groups else resp


def drop_reasons(track: RolloutTrack) -> Counter[str]:
    """Counts the samples of weight 0 by the reward that failed, or as `sibling` if another of their group failed."""
    failures = track.failures or [()] * len(track)
    has_reward = track.rewards.isfinite().tolist() if track.rewards is not None else [True] * len(track)
    return Counter(
        SIBLING if scored else failures[row][0].reward
        for row, (weight, scored) in enumerate(zip(track.weight.tolist(), has_reward, strict=True))
        if weight == 0
    )


def first_failure(resp: RolloutResp) -> tuple[str, int, ScoringFailure]:
    """Returns (track, row, failure) of the first sample without a reward."""
    for name, track in resp.tracks.items():
        if track.rewards is not None and track.failures is not None:
            for row, score in enumerate(track.rewards.tolist()):
                if not math.isfinite(score):
                    return name, row, track.failures[row][0]
    raise ValueError("every sample of this response has a reward")
