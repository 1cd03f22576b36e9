"""What happens to the arguments of a role's method when the driver calls it.

A method that may cross a process boundary is marked once, with the rule that joins the ranks' results:

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    def generate(self, req: RolloutReq) -> RolloutResp: ...

Nothing is guessed from a leading dimension: `scatter` cuts arguments that are `Rows` and passes everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import chain
from typing import Any, Literal, TypeVar

from unirl.config.errors import GeometryError
from unirl.types.batch import compact
from unirl.types.rows import Rows

Mode = Literal["scatter", "broadcast", "rank0", "collect"]
Join = Callable[[Sequence[Any]], Any]
Order = Callable[[Any, list[int]], Any]
Method = TypeVar("Method", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


@dataclass(frozen=True)
class Dispatch:
    """How one method is called on the ranks of its role, and how their results become one."""

    mode: Mode
    join: Join
    order: Order | None = None


def first(results: Sequence[Any]) -> Any:
    """The result of rank 0; for methods whose results are equal on every rank."""
    return results[0]


def scatter(join: Join, order: Order | None = None) -> Callable[[Method], Method]:
    """Each data-parallel rank gets its rows; `join` makes one result of theirs, in rank order.

    Args:
        order: for results with one entry per row: `order(joined, indices)` selects entries. The caller gets them as it
            sent the rows, without fill. A result that is no row of anything (metrics) has none.
    """
    return _marked(Dispatch("scatter", join, order))


def broadcast(method: Method) -> Method:
    """Every rank gets the same arguments and returns an equal result."""
    return _marked(Dispatch("broadcast", first))(method)


def rank0(method: Method) -> Method:
    """Rank 0 alone is called."""
    return _marked(Dispatch("rank0", first))(method)


def collect(method: Method) -> Method:
    """Every rank gets the same arguments; the caller gets a list of their results, in rank order."""
    return _marked(Dispatch("collect", list))(method)


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


@dataclass(frozen=True)
class SplitCall:
    """A call as its ranks get it, and the way back from their results to the caller's."""

    what: str
    dispatch: Dispatch
    calls: tuple[Call, ...]
    """The arguments of ranks 0, 1, ...: of rank 0 alone when only it is called."""
    num_rows: int | None = None
    """The rows of all ranks, fill counted; absent when nothing was cut by rows."""
    indices: list[int] | None = None
    """Where the rows that were sent stand in the joined result; absent when they stand there as they were sent."""

    def merge(self, results: Sequence[Any]) -> Any:
        """One result from those of the ranks, in rank order. Raises ValueError when rows are missing or too many."""
        joined = self.dispatch.join(results)
        if self.dispatch.order is None or self.num_rows is None:
            return joined
        if len(joined) != self.num_rows:
            raise ValueError(f"{self.what} gave {len(joined)} rows for {self.num_rows}: it must answer row by row")
        return joined if self.indices is None else self.dispatch.order(joined, self.indices)


def split_call(what: str, dispatch: Dispatch, call: Call, num_ranks: int, num_updates: int = 1) -> SplitCall:
    """The call of each rank.

    Args:
        what: the call's name in errors, `role.method`.
        num_updates: U of the row layout.

    Raises:
        TypeError: a scattered call over several ranks has nothing to cut.
        ValueError: its arguments differ in their number of rows, or have none.
        ConfigError: 2010 when the rows do not divide among the ranks and the result has no row that could be left out.
    """
    if dispatch.mode != "scatter":
        return SplitCall(what, dispatch, (call,) * (1 if dispatch.mode == "rank0" else num_ranks))
    num_rows = _common_rows(what, call)
    if num_ranks == 1:
        return SplitCall(what, dispatch, (call,), num_rows)
    if num_rows is None:
        raise TypeError(f"{what} is scattered over {num_ranks} ranks, but no argument has rows: mark it @broadcast")
    rows = rank_rows(num_rows, num_updates, num_ranks)
    if dispatch.order is None and sum(map(len, rows)) > num_rows:
        raise GeometryError(
            f"{what} got {num_rows} rows for {num_ranks} workers: {num_rows} / {num_ranks} is no whole number, and "
            "copies that fill up would count twice. Make batch_size x samples_per_prompt a multiple of the workers"
        )
    indices, standing = sent_order(rows), sum(map(len, rows))
    in_place = indices == list(range(standing))
    calls = tuple(_share(call, chosen) for chosen in rows)
    return SplitCall(what, dispatch, calls, standing, None if in_place else indices)


def _common_rows(what: str, call: Call) -> int | None:
    args, kwargs = call
    named = [(f"argument {i + 1}", value) for i, value in enumerate(args)] + list(kwargs.items())
    sizes = {f"{name} ({type(value).__name__})": len(value) for name, value in named if isinstance(value, Rows)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"{what} cuts its arguments by the same rows, but {listed} rows")
    if 0 in sizes.values():
        raise ValueError(f"{what} got no rows: {', '.join(sizes)} is empty")
    return next(iter(sizes.values()), None)


def _share(call: Call, rows: list[int]) -> Call:
    """The call with the arguments' rows `rows`, in storage of their own: a view would travel with all of its rows."""

    def share(value: Any) -> Any:
        return compact(value.select(rows)) if isinstance(value, Rows) else value

    args, kwargs = call
    return tuple(share(value) for value in args), {name: share(value) for name, value in kwargs.items()}


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
