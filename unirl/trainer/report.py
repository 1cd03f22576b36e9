"""What the loop says of its samples: statistics of rewards, rows for the ledger and the sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from unirl.config.errors import RewardError
from unirl.reward.failures import first_failure
from unirl.tracking.samples import SampleRow
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import Preview
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack


def reward_metrics(track: RolloutTrack) -> dict[str, float]:
    """Reward statistics over the rows that have one, and of logged-only rewards over the rows that they scored."""
    assert track.rewards is not None
    alive = track.weight > 0
    rewards = track.rewards[alive].double()
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
    }
    for name, scores in (track.component_rewards or {}).items():
        metrics |= _spread(name, scores[alive])
    for name, scores in (track.logged_rewards or {}).items():
        found = scores.isfinite()
        metrics |= _spread(name, scores[found]) if found.any() else {}
        if not found.all():
            metrics[f"reward/{name}_missing"] = float((~found).sum())
    return metrics


def _spread(name: str, scores: Tensor) -> dict[str, float]:
    scores = scores.double()
    return {f"reward/{name}_mean": float(scores.mean()), f"reward/{name}_std": float(scores.std(correction=0))}


def spread_rows(group_ids: Sequence[str], count: int) -> list[int]:
    """At most `count` row numbers, as evenly from the groups as can be: first rows of each, siblings adjacent."""
    seen: Counter[str] = Counter()
    ranks = []
    for i, group in enumerate(group_ids):
        ranks.append((seen[group], i))
        seen[group] += 1
    return sorted(i for _, i in sorted(ranks)[:count])


def sample_rows(req: RolloutReq, track: RolloutTrack, name: str) -> tuple[SampleRow, ...]:
    """What is known of each row of `track`, which is called so; the request's rows are the same."""
    assert track.rewards is not None and track.advantages is not None
    facts, prompts, image_uris = track.segment.facts(), req.prompts(), req.prompt_image_uris()
    components = {**(track.component_rewards or {}), **(track.logged_rewards or {})}
    return tuple(
        SampleRow(
            sample_id=track.sample_ids[i],
            group_id=track.group_ids[i],
            prompt=prompts[i],
            pictures=image_uris[i],
            reward=float(track.rewards[i]),
            rewards={name: float(scores[i]) for name, scores in components.items()},
            advantage=float(track.advantages[i]),
            weight=float(track.weight[i]),
            weight_version=int(track.weight_version[i]),
            facts=facts[i],
            track=name,
        )
        for i in range(len(track))
    )


def scored_rows(track: RolloutTrack) -> list[int]:
    """The rows that have a reward, whether they are trained or not."""
    assert track.rewards is not None
    return track.rewards.isfinite().nonzero().flatten().tolist()


def constant_reward(track: RolloutTrack) -> float | None:
    """The reward that all samples have, if there are several and all have the same."""
    assert track.rewards is not None
    rewards = track.rewards[track.weight > 0]
    return float(rewards[0]) if len(rewards) > 1 and bool((rewards == rewards[0]).all()) else None


def eval_result(req: RolloutReq, track: RolloutTrack, preview: Callable[[Any], Preview]) -> EvalResult:
    """The scores of an evaluation with what was asked and what was drawn; rows without a reward are counted.

    Raises:
        RewardError: 6002 when no row has one.
    """
    rows = scored_rows(track)
    unscored = len(track) - len(rows)
    if not rows:
        failure = first_failure(RolloutResp({"": track}))[2]
        raise RewardError.of_code(failure.code)(
            f"no sample of the evaluation could be scored. The first: {failure.why}"
        )
    if unscored:
        req, track = req.select(rows), track.select(rows)
    assert track.rewards is not None
    return EvalResult(
        sample_ids=tuple(track.sample_ids),
        group_ids=tuple(track.group_ids),
        prompts=tuple(req.prompts()),
        prompt_image_uris=tuple(req.prompt_image_uris()),
        rewards=track.rewards,
        components=dict(track.component_rewards or {}),
        logged_rewards=dict(track.logged_rewards or {}),
        answers=None if track.answers is None else tuple(track.answers),
        facts=tuple(track.segment.facts()),
        unscored=unscored,
        media=preview(track.decoded),
    )


def reward_events(resp: RolloutResp) -> Iterator[tuple[str, dict[str, str]]]:
    """What to write down of failed rewards: the first failure of each, and every group that was dropped."""
    for name, track in resp.tracks.items():
        told: set[str] = set()
        dropped: dict[str, str] = {}
        for row, failures in enumerate(track.failures or ()):
            for failure in failures:
                if failure.reward not in told:
                    told.add(failure.reward)
                    sample = track.sample_ids[row]
                    yield "reward.error", {"reward": failure.reward, "sample": sample, "why": failure.why}
            if failures and track.weight[row] == 0:
                dropped.setdefault(resp.root_groups(name)[row], failures[0].reward)
        for group, reason in dropped.items():
            yield "group.drop", {"group": group, "reason": reason}
