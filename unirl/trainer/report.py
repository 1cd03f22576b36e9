"""What the loop says of its samples: statistics of rewards, rows for the ledger and the sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from unirl.tracking.samples import SampleRow
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack


def reward_metrics(track: RolloutTrack) -> dict[str, float]:
    """Reward statistics over rows of weight > 0."""
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
        chosen = scores[alive].double()
        metrics |= {f"reward/{name}_mean": float(chosen.mean()), f"reward/{name}_std": float(chosen.std(correction=0))}
    return metrics


def spread_rows(group_ids: Sequence[str], count: int) -> list[int]:
    """At most `count` row numbers, as evenly from the groups as can be: first rows of each, siblings adjacent."""
    seen: Counter[str] = Counter()
    ranks = []
    for i, group in enumerate(group_ids):
        ranks.append((seen[group], i))
        seen[group] += 1
    return sorted(i for _, i in sorted(ranks)[:count])


def sample_rows(req: RolloutReq, track: RolloutTrack) -> tuple[SampleRow, ...]:
    """What is known of each row of `track`; the request's rows are the same."""
    assert track.rewards is not None and track.advantages is not None
    components = track.component_rewards or {}
    return tuple(
        SampleRow(
            sample_id=track.sample_ids[i],
            group_id=track.group_ids[i],
            prompt=texts_of(req)[i],
            reward=float(track.rewards[i]),
            rewards={name: float(scores[i]) for name, scores in components.items()},
            advantage=float(track.advantages[i]),
            weight=float(track.weight[i]),
            weight_version=int(track.weight_version[i]),
        )
        for i in range(len(track))
    )


def texts_of(req: RolloutReq) -> list[str]:
    """The prompt of every row."""
    prompts = req.primitives["text"]
    assert isinstance(prompts, Texts)
    return prompts.texts


def eval_result(req: RolloutReq, track: RolloutTrack, images: Tensor) -> EvalResult:
    """The scores of an evaluation with what was asked and what was drawn."""
    assert track.rewards is not None
    return EvalResult(
        sample_ids=tuple(track.sample_ids),
        group_ids=tuple(track.group_ids),
        prompts=tuple(texts_of(req)),
        rewards=track.rewards,
        components=dict(track.component_rewards or {}),
        images=images,
    )
