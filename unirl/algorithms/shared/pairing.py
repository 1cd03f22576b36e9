"""Samples of a group against each other: the best beside the worst, for losses on pairs; or the best alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.algorithms.shared.estimator import Estimator, Reward, Standardized
from unirl.algorithms.shared.groups import Groups
from unirl.types.rollout_resp import AdvantageResult, RolloutTrack, Scores


@dataclass(frozen=True)
class Pairs:
    """Rows in pairs: rows[2 i] is the winner, rows[2 i + 1] the loser."""

    rows: list[int]
    told_apart: list[bool]
    """Per pair: both rows count, and the winner is better. Nothing is learned from any other pair."""


def best_and_worst(advantages: Tensor, group_ids: Sequence[str], weight: Tensor, num_pairs: int) -> Pairs:
    """Of each group the best with the worst, the second best with the second worst, and so on.

    Groups come in order of appearance, ties in row order. Rows of weight 0 are taken only where others are too few.

    Args:
        advantages: [B].
        weight: [B].
        num_pairs: pairs per group, at most: a group of n rows has n // 2.
    """
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    values, alive = advantages.tolist(), (weight > 0).tolist()
    rows: list[int] = []
    told_apart: list[bool] = []
    for members in groups.values():
        count = min(num_pairs, len(members) // 2)
        ranked = _ranked(members, values, alive, 2 * count)
        for winner, loser in zip(ranked[:count], reversed(ranked[count:]), strict=True):
            rows += [winner, loser]
            told_apart.append(alive[winner] and alive[loser] and values[winner] > values[loser])
    return Pairs(rows, told_apart)


def _ranked(members: list[int], values: list[float], alive: list[bool], count: int) -> list[int]:
    """`count` rows from best to worst, the middle left out; rows that do not count, if needed, in the middle."""
    counted = sorted((row for row in members if alive[row]), key=lambda row: -values[row])
    fill = [row for row in members if not alive[row]][: max(0, count - len(counted))]
    half = min(count // 2, -(-len(counted) // 2))
    return counted[:half] + fill + counted[max(half, len(counted) - count // 2) :]


def in_pairs(track: RolloutTrack, num_pairs: int) -> RolloutTrack:
    """The rows that are trained, up to `num_pairs` pairs per group, each winner followed by its loser.

    A pair that nothing tells apart keeps its place with weight 0, so that groups of one size give equally many rows.
    """
    assert track.advantages is not None, "pairs are made by advantages: compute_advantages comes first"
    pairs = best_and_worst(track.advantages, track.group_ids, track.weight, num_pairs)
    chosen = track.select(pairs.rows)
    told_apart = torch.tensor(pairs.told_apart, device=chosen.weight.device).repeat_interleave(2)
    return chosen.replace(weight=torch.where(told_apart, chosen.weight, 0.0))


@dataclass(frozen=True, kw_only=True)
class BestOfGroup(Estimator):
    """A = 1 for the best sample of each group; the others are not trained. With DiffusionRWR(weighting=advantage): SFT.

    Of several that are equally good the first is taken; a group whose rewards are all equal is left out.
    """

    def standardize(self, reward: Reward, groups: Groups, scores: Scores) -> Standardized:
        best = groups.ranks(-reward.values) == 0
        return Standardized(best.double(), groups.dead(reward.values)[groups.index], {})

    def __call__(self, scores: Scores) -> AdvantageResult:
        result = super().__call__(scores)
        trained = (result.advantages > 0).to(result.weight.device)
        return replace(result, weight=result.weight.where(trained, 0.0))
