"""Which rows of an update are forwarded together, where rows cost different amounts of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Micro:
    """The rows of one micro-batch."""

    rows: tuple[int, ...]
    is_fill: bool = False
    """Copies of rows of another one, to be weighted 0: they keep a rank in step with the others."""


def within_budget(costs: Sequence[int], budget: int, together: int) -> list[Micro]:
    """Few micro-batches of at most `budget`, costly rows first. A bundle that costs more is one by itself.

    First-fit decreasing: at most 11/9 of the fewest possible, and one.

    Args:
        costs: of each row, >= 0.
        together: adjacent rows that form a bundle, which is never split.
    """
    bundles = [tuple(range(start, start + together)) for start in range(0, len(costs), together)]
    price = {bundle: sum(costs[row] for row in bundle) for bundle in bundles}
    held: list[list[tuple[int, ...]]] = []
    spent: list[int] = []
    for bundle in sorted(bundles, key=lambda each: (-price[each], each)):
        place = next((i for i, cost in enumerate(spent) if cost + price[bundle] <= budget), len(held))
        if place == len(held):
            held.append([])
            spent.append(0)
        held[place].append(bundle)
        spent[place] += price[bundle]
    return [Micro(tuple(sorted(row for bundle in micro for row in bundle))) for micro in held]


def as_many(micros: Sequence[Micro], count: int, costs: Sequence[int], together: int) -> list[Micro]:
    """The micro-batches in exactly `count` pieces: the costliest are halved, and where none can be, fill follows."""
    pieces = list(micros)
    while len(pieces) < count:
        largest = max(pieces, key=lambda micro: (len(micro.rows) > together, _cost(micro, costs)))
        if len(largest.rows) <= together:
            break
        half = len(largest.rows) // together // 2 * together
        at = pieces.index(largest)
        pieces[at : at + 1] = [Micro(largest.rows[:half]), Micro(largest.rows[half:])]
    cheapest = min(pieces, key=lambda micro: _cost(micro, costs))
    return [*pieces, *[Micro(cheapest.rows, is_fill=True)] * (count - len(pieces))]


def _cost(micro: Micro, costs: Sequence[int]) -> int:
    return sum(costs[row] for row in micro.rows)
