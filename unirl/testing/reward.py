"""What every scorer must keep, for a scorer of your own too."""

from __future__ import annotations

import torch

from unirl.reward.scoring import checked_score, name_of
from unirl.types.protocols import Scorer
from unirl.types.reward import RewardRequest, RewardResponse


def check_reward(scorer: Scorer, request: RewardRequest, *, atol: float = 1e-5) -> RewardResponse:
    """The scores of `request`, after checking that they are finite, as many as the rows, and each row's own.

    A row's score must not depend on its place, on its neighbours, on how many there are, or on an earlier call.
    `request` holds at least three rows that differ. Raises AssertionError naming what was broken, or RewardError.
    """
    count = len(request)
    assert count >= 3, f"check_reward needs at least 3 rows that differ, got {count}"
    name = name_of(scorer)
    answer = checked_score(scorer, request, name)
    reversed_rows = list(reversed(range(count)))
    orders = {
        "a second call": [list(range(count))],
        "the order of rows": [reversed_rows],
        "the size of the batch": [[row] for row in range(count)],
        "its neighbours": [reversed_rows[: count // 2], reversed_rows[count // 2 :]],
    }
    for what, parts in orders.items():
        for rows in parts:
            again = checked_score(scorer, request.select(rows), name)
            _assert_same(answer, again, rows, f"{name}: a score depends on {what}", atol)
    return answer


def _assert_same(answer: RewardResponse, again: RewardResponse, rows: list[int], what: str, atol: float) -> None:
    assert again.components.keys() == answer.components.keys(), (
        f"{what}: components {sorted(again.components)}, before {sorted(answer.components)}"
    )
    pairs = {"total": (answer.total, again.total)} | {k: (v, again.components[k]) for k, v in answer.components.items()}
    for part, (first, second) in pairs.items():
        gap = (first[rows] - second).abs()
        worst = int(gap.argmax())
        assert bool(torch.allclose(first[rows], second, atol=atol, rtol=0)), (
            f"{what}: {part} of row {rows[worst]} was {float(first[rows[worst]])}, then {float(second[worst])}"
        )
