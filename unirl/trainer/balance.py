"""Divides the rows of an update among ranks, so that rows of unequal length give every rank about the same work."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.rollout_resp import RolloutTrack


def balanced_track(track: RolloutTrack, num_updates: int, num_ranks: int, together: int = 1) -> RolloutTrack:
    """The track with its rows reordered: ranks get equal counts and nearly equal work, and each update keeps its rows.

    The order does not change with one rank, with rows of equal cost, or if the counts do not divide.
    """
    costs = track.costs() if num_ranks > 1 else None
    if costs is None or len(track) % (num_updates * num_ranks * together):
        return track
    order = balanced_order(costs.tolist(), num_updates, num_ranks, together)
    return track if order == list(range(len(track))) else track.select(order)


def balanced_order(costs: Sequence[int], num_updates: int, num_ranks: int, together: int = 1) -> list[int]:
    """Row numbers in the order of the row layout: update by update, and rank by rank inside each update.

    Args:
        costs: the cost of each row, such as its number of tokens.
        together: the number of adjacent rows that stay together.
    """
    size = len(costs) // num_updates
    updates = [range(start, start + size) for start in range(0, len(costs), size)]
    return [row for update in updates for row in _assigned(update, costs, num_ranks, together)]


def _assigned(update: range, costs: Sequence[int], num_ranks: int, together: int) -> list[int]:
    """The rows of one update, rank by rank. They keep their order if no other one makes the slowest rank faster.

    Greedy: the most expensive bundle of rows goes first, each one to the rank with the least work that is not full.
    """
    bundles = [update[start : start + together] for start in range(0, len(update), together)]
    cost_of = {bundle: sum(costs[row] for row in bundle) for bundle in bundles}
    share = len(bundles) // num_ranks
    assigned: list[list[range]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for bundle in sorted(bundles, key=lambda bundle: (-cost_of[bundle], bundle.start)):
        free = [rank for rank in range(num_ranks) if len(assigned[rank]) < share]
        rank = min(free, key=lambda rank: (load[rank], rank))
        assigned[rank].append(bundle)
        load[rank] += cost_of[bundle]
    in_order = [bundles[start : start + share] for start in range(0, len(bundles), share)]
    if max(load) >= max(sum(cost_of[bundle] for bundle in rank_bundles) for rank_bundles in in_order):
        return list(update)
    return [row for rank_bundles in assigned for row in sorted(row for bundle in rank_bundles for row in bundle)]
