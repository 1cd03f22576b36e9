"""Which rows of a call stand on which rank (design, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain


def rank_rows(num_rows: int, num_updates: int, num_ranks: int) -> list[list[int]]:
    """The rows of each rank, in rank order; all ranks get equally many.

    Update u of U is the rows [u B / U, (u + 1) B / U); ranks divide inside it, and a rank's rows are its share of
    update 0, then of update 1, and so on. So a rank that cuts its rows into U equal pieces finds its share of update u.

    Rows that U x ranks does not divide (evaluations, previews) are one update, filled up with copies of the last row.
    """
    if min(num_rows, num_updates, num_ranks) < 1:
        raise ValueError(
            f"no layout for {num_rows} rows, {num_updates} updates, {num_ranks} ranks: each must be at least 1"
        )
    if num_rows % (num_updates * num_ranks):
        num_updates = 1
    share = -(-num_rows // (num_updates * num_ranks))
    return [
        [
            min((update * num_ranks + rank) * share + i, num_rows - 1)
            for update in range(num_updates)
            for i in range(share)
        ]
        for rank in range(num_ranks)
    ]


def sent_order(rows: Sequence[Sequence[int]]) -> list[int]:
    """Where rows 0, 1, ... stand when the ranks' rows are laid end to end; the inverse of `rank_rows`.

    A row that stands on several places counts at its first one, so fill rows are left out.
    """
    places: dict[int, int] = {}
    for place, row in enumerate(chain.from_iterable(rows)):
        places.setdefault(row, place)
    return [places[row] for row in range(len(places))]
