"""Dynamic sampling: a step draws until it has enough informative groups (DAPO, arXiv:2503.14476, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unirl.algorithms.shared.groups import Groups
from unirl.config.recipe import RefillConfig
from unirl.reward.service import concat_scored
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.rows import rows_by_key

EQUAL = "equal_rewards"
"""Reason why a sample is not trained: all samples of its group have the same reward."""
SURPLUS = "surplus"
"""Reason: the last batch had more informative groups than the step had room for."""

TOO_OLD = "too_old"
"""Reason: its weights are older than `asynchronous.max_staleness` allows."""


@dataclass(frozen=True)
class SelectedSamples:
    """The samples that a step trains on, and what became of the others."""

    req: RolloutReq
    resp: RolloutResp
    reasons: Mapping[str, int] = field(default_factory=dict)
    """How many scored samples of the track are left out, by reason. Samples of padding groups are included."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    missing: int = 0
    """Padding groups: groups of weight 0 that complete the batch."""
    num_replaced: int = 0
    """Samples that are counted in `reasons` and were replaced, so they are not in `resp`."""


@dataclass
class StepSamples:
    """All scored samples of one step, from one or several batches of prompts.

    Samples that a step does not train are dropped: the next step continues with the next prompts.
    """

    config: RefillConfig | None
    """None = the step is one batch of prompts, whatever its rewards are."""
    batch_size: int
    """Groups that the step trains, and prompts of one batch."""
    reqs: list[RolloutReq] = field(default_factory=list)
    resps: list[RolloutResp] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)
    """The longest waits of any batch, by metric."""
    num_informative: int = 0
    num_too_old: int = 0
    """Samples of the last track that were older than the bound when their turn came."""
    num_replaced: int = 0
    """How many of them were sampled again."""
    dropped: Sequence[str] = ()
    """The groups that are not trained because they are too old."""

    @property
    def is_complete(self) -> bool:
        """The step needs no further batch, or may not take one."""
        if self.config is None:
            return bool(self.resps)
        return self.num_informative >= self.batch_size or len(self.resps) >= self.config.max_draws

    def add(self, req: RolloutReq, resp: RolloutResp, waits: Mapping[str, float]) -> None:
        """Take the scored samples of one batch."""
        self.reqs.append(req)
        self.resps.append(resp)
        self.num_informative += len(informative_groups(resp)) if self.config is not None else 0
        self.waits = {name: max(value, self.waits.get(name, value)) for name, value in waits.items()}

    def everything(self) -> tuple[RolloutReq, RolloutResp]:
        """All samples of the step, in the order in which they were generated."""
        if len(self.resps) == 1:
            return self.reqs[0], self.resps[0]
        return RolloutReq.concat(self.reqs), concat_scored(self.resps)

    def select(self, req: RolloutReq, resp: RolloutResp, track: str) -> SelectedSamples:
        """The first `batch_size` informative groups; where there are fewer, padding groups of weight 0 follow.

        Args:
            req, resp: everything, with weight 0 where a sample has no reward.
            track: whose samples are counted.
        """
        if self.config is None:
            return self._without_old(req, resp, track)
        rows = rows_by_key(resp.root_track().group_ids)
        informative = informative_groups(resp)
        chosen = informative[: self.batch_size]
        others = [group for group in rows if group not in set(informative)]
        padding = others[: self.batch_size - len(chosen)]
        selected_rows = [row for group in chosen + padding for row in rows[group]]
        metrics = {
            "samples/draws": float(len(self.resps)),
            "samples/padding": float(sum(len(rows[group]) for group in padding)),
            "rollout/informative_group_ratio": len(informative) / len(rows),
        }
        reasons = left_out(resp, track, informative, chosen)
        selected = resp.select(selected_rows).drop(padding)
        return SelectedSamples(req.select(selected_rows), selected, reasons, metrics, len(padding))

    def _without_old(self, req: RolloutReq, resp: RolloutResp, track: str) -> SelectedSamples:
        """All samples, with weight 0 where they are too old."""
        if not self.num_too_old:
            return SelectedSamples(req, resp)
        groups = zip(resp.root_groups(track), resp.tracks[track].weight.tolist(), strict=True)
        dropped = sum(group in self.dropped and weight > 0 for group, weight in groups)
        count = dropped + self.num_replaced
        metrics = {"rollout/too_old": float(self.num_too_old)}
        reasons = {TOO_OLD: count} if count else {}
        return SelectedSamples(req, resp.drop(self.dropped), reasons, metrics, num_replaced=self.num_replaced)


def informative_groups(resp: RolloutResp) -> list[str]:
    """The groups of root samples below which rewards differ, in order; of those in which none is missing."""
    differing: set[str] = set()
    failed: set[str] = set()
    for name, track in resp.tracks.items():
        if track.rewards is None:
            continue
        above = resp.root_groups(name)
        dead = Groups.of(above, track.weight.double()).all_equal(track.rewards.double()).tolist()
        differing |= {group for group, equal in zip(dict.fromkeys(above), dead, strict=True) if not equal}
        failed |= {group for group, known in zip(above, track.rewards.isfinite().tolist(), strict=True) if not known}
    return [group for group in dict.fromkeys(resp.root_track().group_ids) if group in differing - failed]


def left_out(resp: RolloutResp, track: str, informative: Sequence[str], chosen: Sequence[str]) -> dict[str, int]:
    """How many samples of a track, of those that are not dropped for other reasons, are not trained and why."""
    groups = zip(resp.root_groups(track), resp.tracks[track].weight.tolist(), strict=True)
    alive = [group for group, weight in groups if weight > 0]
    able, taken = set(informative), set(chosen)
    equal = sum(group not in able for group in alive)
    surplus = sum(group in able - taken for group in alive)
    return {reason: count for reason, count in ((EQUAL, equal), (SURPLUS, surplus)) if count}
