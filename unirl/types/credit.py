"""Rules of credit in a tree of tracks, by name. docs/credit.md has their algebra, and says when to use which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the reward service reads its settings without torch
    from torch import Tensor

CreditName = Literal["mean", "max", "sum", "best_of_n", "leave_one_out"]
"""The rules that a recipe can name."""
RewardOp = CreditName | Literal["last"]
"""All rules. `last` is for children that follow one another, such as the steps of an episode."""


@dataclass(frozen=True, kw_only=True)
class CreditRule:
    """The reward of a parent from those of its children, and how the children are trained.

    Rows of weight 0 take no part: they reach no parent, and they are nobody's sibling.
    """

    reduce: Callable[[Tensor], Tensor]
    """The reward of a parent from the rewards [n] of its n >= 1 children of weight > 0."""
    best_only: bool = False
    """A parent gets the rewards of its best child alone, and only this child is trained."""
    leave_one_out: bool = False
    """The advantage of every row is its reward minus the mean reward of its siblings, whatever the estimator's std."""


CREDIT_RULES: Mapping[RewardOp, CreditRule] = {
    "mean": CreditRule(reduce=lambda r: r.mean()),
    "max": CreditRule(reduce=lambda r: r.max()),
    "sum": CreditRule(reduce=lambda r: r.sum()),
    "last": CreditRule(reduce=lambda r: r[-1]),
    "best_of_n": CreditRule(reduce=lambda r: r.max(), best_only=True),
    "leave_one_out": CreditRule(reduce=lambda r: r.mean(), leave_one_out=True),
}
