"""The check of a scorer: a score depends on its own row alone, and a gradient is that of the score."""

from __future__ import annotations

import torch

from unirl.reward.base import RewardScorer
from unirl.reward.scoring import checked_score, name_of, objective_of
from unirl.types.reward import RewardRequest, RewardResponse


def check_reward(scorer: RewardScorer, request: RewardRequest, *, atol: float = 1e-5) -> RewardResponse:
    """The scores of `request`. Raises AssertionError or RewardError if the scorer breaks its contract.

    Scores must be finite, one per row. The score of a row must not depend on its position, on other rows, on the size
    of the batch or on an earlier call. `request` has at least three different rows.
    """
    count = len(request)
    assert count >= 3, f"check_reward needs at least 3 different rows, got {count}"
    name = name_of(scorer)
    answer = checked_score(scorer, request, name)
    reversed_rows = list(reversed(range(count)))
    orders = {
        "a second call": [list(range(count))],
        "the order of rows": [reversed_rows],
        "the size of the batch": [[row] for row in range(count)],
        "other rows of the batch": [reversed_rows[: count // 2], reversed_rows[count // 2 :]],
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


def check_gradient(scorer: RewardScorer, request: RewardRequest, *, rtol: float = 0.05, gap: float = 0.05) -> None:
    """Raises AssertionError or RewardError unless `objective` equals `score` and has the right gradient.

    `objective` gets images that are not rounded to uint8 levels.

    Args:
        rtol: allowed difference between directional derivatives and central differences, relative to the largest.
        gap: allowed difference between objective and score, relative to max(1, |score|), since `score` may round.
    """
    name = name_of(scorer)
    assert request.images is not None, "check_gradient needs images"
    prompts = list(request.prompts or [""] * len(request))
    scores = checked_score(scorer, request, name).total
    objectives = objective_of(scorer, request.images, prompts).detach().float().cpu()
    apart = ((objectives - scores).abs() / scores.abs().clamp(min=1.0)).max()
    assert float(apart) <= gap, f"{name}: objective and score differ by {float(apart):.3g} on the same images"

    inside = 0.25 + 0.5 * request.images  # differences must not leave [0, 1]
    direction = torch.randn(inside.shape, generator=torch.Generator().manual_seed(0)).sign()
    moved = inside.clone().requires_grad_()
    total = objective_of(scorer, moved, prompts).sum()
    assert total.requires_grad, f"{name}: objective gives no gradient"
    (gradient,) = torch.autograd.grad(total, moved)
    along = (gradient * direction).flatten(1).sum(1)
    with torch.no_grad():
        ahead, behind = (objective_of(scorer, inside + side * STEP * direction, prompts) for side in (1, -1))
    slope = (ahead - behind) / (2 * STEP)
    off = (along - slope).abs().max() / slope.abs().max().clamp(min=1e-6)
    assert float(off) <= rtol, (
        f"{name}: the directional derivative is {along.tolist()}, but central differences are {slope.tolist()}"
    )


STEP = 1e-3
"""Step of the central differences, for pixels in [0, 1]."""
