"""What happens to the arguments of a role's method when the driver calls it.

A method that may cross a process boundary is marked once, with the rule that joins the ranks' results. Nothing is
guessed from a leading dimension: `scatter` cuts arguments that are `Batch`es by rows and passes everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import Any, Literal, TypeVar

Mode = Literal["scatter", "broadcast", "rank0"]
Merge = Callable[[Sequence[Any]], Any]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """How one method is called on the ranks of its role, and how their results become one."""

    mode: Mode
    merge: Merge


def first(results: Sequence[Any]) -> Any:
    """The result of rank 0; for methods whose results are equal on every rank."""
    return results[0]


def scatter(merge: Merge) -> Callable[[Method], Method]:
    """Each data-parallel rank gets its rows; `merge` joins the results."""
    return _marked(Dispatch("scatter", merge))


def broadcast(method: Method) -> Method:
    """Every rank gets the same arguments and returns an equal result."""
    return _marked(Dispatch("broadcast", first))(method)


def rank0(method: Method) -> Method:
    """Rank 0 alone is called."""
    return _marked(Dispatch("rank0", first))(method)


def _marked(dispatch: Dispatch) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        method.__dict__["dispatch"] = dispatch
        return method

    return mark


def remote_methods(role: type) -> dict[str, Dispatch]:
    """The methods of a role class that cross a process boundary. An override keeps the mark of what it overrides."""
    marks: dict[str, Dispatch] = {}
    for cls in reversed(role.__mro__):
        for name, member in vars(cls).items():
            if isfunction(member) and "dispatch" in vars(member):
                marks[name] = vars(member)["dispatch"]
    return marks
