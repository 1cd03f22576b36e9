"""Which rank trains which rows of an update, where rows cost different amounts of work."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.rollout_resp import RolloutTrack


def balanced_track(track: RolloutTrack, num_updates: int, num_ranks: int, together: int = 1) -> RolloutTrack:
    """The rows so ordered that ranks get equally many and nearly equal work; each update keeps its rows.

    Without change where there is one rank, where all rows cost the same, and where counts do not divide.
    """
    costs = track.costs() if num_ranks > 1 else None
    if costs is None or len(track) % (num_updates * num_ranks * together):
        return track
    order = balanced_order(costs.tolist(), num_updates, num_ranks, together)
    return track if order == list(range(len(track))) else track.select(order)


def balanced_order(costs: Sequence[int], num_updates: int, num_ranks: int, together: int = 1) -> list[int]:
    """Row numbers as the layout cuts them: update by update, and inside each one rank by rank.

    Args:
        costs: of each row.
        together: adjacent rows that stay together.
    """
    size = len(costs) // num_updates
    updates = [range(start, start + size) for start in range(0, len(costs), size)]
    return [row for update in updates for row in _dealt(update, costs, num_ranks, together)]


def _dealt(update: range, costs: Sequence[int], num_ranks: int, together: int) -> list[int]:
    """The rows of one update, rank by rank: as they stand, if dealing them out makes the costliest rank no cheaper.

    Bundles are dealt one by one, the costliest first, to the rank that has least so far and is not full.
    """
    bundles = [update[start : start + together] for start in range(0, len(update), together)]
    price = {bundle.start: sum(costs[row] for row in bundle) for bundle in bundles}
    share = len(bundles) // num_ranks
    hands: list[list[range]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for bundle in sorted(bundles, key=lambda bundle: (-price[bundle.start], bundle.start)):
        rank = min((rank for rank in range(num_ranks) if len(hands[rank]) < share), key=lambda rank: (load[rank], rank))
        hands[rank].append(bundle)
        load[rank] += price[bundle.start]
    stood = [bundles[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    if max(load) >= max(sum(price[bundle.start] for bundle in hand) for hand in stood):
        return list(update)
    return [row for hand in hands for bundle in sorted(hand, key=lambda bundle: bundle.start) for row in bundle]
