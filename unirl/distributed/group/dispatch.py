"""How a call of the driver becomes calls on the ranks of a role, and which rows each rank gets.

A method that may cross a process boundary is marked once, with the rule that joins the ranks' results:

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    def generate(self, req: RolloutReq) -> RolloutResp: ...

`scatter` divides arguments that are `Rows` and passes all others unchanged. It never guesses from a leading dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, TypeVar

from unirl.config.errors import GeometryError
from unirl.types.batch import compact
from unirl.types.rows import Rows

Mode = Literal["scatter", "broadcast", "rank0", "collect"]
Join = Callable[[Sequence[Any]], Any]
Order = Callable[[Any, list[int]], Any]
Method = TypeVar("Method", bound=Callable[..., Any])
Call = tuple[tuple[object, ...], dict[str, object]]
"""Positional and named arguments."""


@dataclass(frozen=True)
class Dispatch:
    """How one method is called on the ranks of its role, and how their results become one."""

    mode: Mode
    join: Join
    order: Order | None = None
    unread: tuple[str, ...] = ()
    """Fields of tracks whose heavy rows stay where they are: the method reads none of them."""


first = itemgetter(0)
"""Joins results that are equal on every rank."""


def _marked(dispatch: Dispatch) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        method.__dict__["dispatch"] = dispatch
        return method

    return mark


def scatter(join: Join, order: Order | None = None, unread: tuple[str, ...] = ()) -> Callable[[Method], Method]:
    """Each data-parallel rank gets its share of the rows; `join` merges the results of the ranks, in rank order.

    Args:
        order: for results with one entry per row: `order(joined, indices)` selects entries. It restores the order in
            which the caller sent the rows and drops padding rows. Results without rows, such as metrics, have none.
        unread: fields of a `RolloutTrack` that the method does not read. Their heavy rows are not sent to the ranks;
            the method gets the handles, and may return them.
    """
    return _marked(Dispatch("scatter", join, order, unread))


broadcast = _marked(Dispatch("broadcast", first))
"""Every rank gets the same arguments and returns an equal result."""
rank0 = _marked(Dispatch("rank0", first))
"""Only rank 0 is called."""
collect = _marked(Dispatch("collect", list))
"""Every rank gets the same arguments; the caller gets a list of their results, in rank order."""


def remote_methods(role: type) -> dict[str, Dispatch]:
    """The methods of a role class that cross a process boundary. An override keeps the mark of what it overrides."""
    marks: dict[str, Dispatch] = {}
    for cls in reversed(role.__mro__):
        for name, attribute in vars(cls).items():
            if isfunction(attribute) and "dispatch" in vars(attribute):
                marks[name] = vars(attribute)["dispatch"]
    return marks


@dataclass(frozen=True)
class SplitCall:
    """The call of each rank, and how their results become the caller's result."""

    what: str
    """`role.method`, for error messages."""
    dispatch: Dispatch
    calls: tuple[Call, ...]
    """The arguments of ranks 0, 1, ...; one entry when only rank 0 is called."""
    num_rows: int | None = None
    """The rows of all ranks together, with padding rows. None when no argument has rows."""
    indices: list[int] | None = None
    """The positions of the caller's rows in the joined result. None when they are already in the caller's order."""

    def merge(self, results: Sequence[Any]) -> Any:
        """The caller's result, from the results in rank order. Raises ValueError for a wrong number of rows."""
        joined = self.dispatch.join(results)
        if self.dispatch.order is None or self.num_rows is None:
            return joined
        if len(joined) != self.num_rows:
            raise ValueError(
                f"{self.what} returned {len(joined)} rows for {self.num_rows} rows: it must return one result per row"
            )
        return joined if self.indices is None else self.dispatch.order(joined, self.indices)


def split_call(what: str, dispatch: Dispatch, call: Call, num_ranks: int, num_updates: int = 1) -> SplitCall:
    """Divide a call among the ranks of a role.

    Args:
        what: `role.method`, for error messages.
        num_updates: U of the row layout.

    Raises:
        TypeError: a scattered call over several ranks has no argument with rows.
        ValueError: its arguments differ in their number of rows, or have none.
        ConfigError: 2010 when the ranks do not divide the rows, and the result has no rows from which padding rows
            could be dropped.
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
            "padding rows would count twice. Make batch_size x samples_per_prompt a multiple of the number of workers"
        )
    indices, num_padded = sent_order(rows), sum(map(len, rows))
    in_place = indices == list(range(num_padded))
    calls = tuple(_share(call, chosen) for chosen in rows)
    return SplitCall(what, dispatch, calls, num_padded, None if in_place else indices)


def _common_rows(what: str, call: Call) -> int | None:
    args, kwargs = call
    named = [(f"argument {i + 1}", value) for i, value in enumerate(args)] + list(kwargs.items())
    sizes = {f"{name} ({type(value).__name__})": len(value) for name, value in named if isinstance(value, Rows)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"{what} needs arguments with equally many rows, but {listed} rows")
    if 0 in sizes.values():
        raise ValueError(f"{what} got no rows: {', '.join(sizes)} is empty")
    return next(iter(sizes.values()), None)


def _share(call: Call, rows: list[int]) -> Call:
    """The call with the rows `rows` of its arguments. They are copied: a view would be sent with its whole storage."""

    def share(value: Any) -> Any:
        return compact(value.select(rows)) if isinstance(value, Rows) else value

    args, kwargs = call
    return tuple(share(value) for value in args), {name: share(value) for name, value in kwargs.items()}


def rank_rows(num_rows: int, num_updates: int, num_ranks: int) -> list[list[int]]:
    """The row layout: the rows of each rank, in rank order. All ranks get equally many.

    Update u of U is the rows [u B / U, (u + 1) B / U), and the ranks divide each update. The rows of a rank are its
    share of update 0, then of update 1, and so on. A rank that cuts its rows into U equal pieces therefore gets its
    share of update u as piece u.

    Where U x ranks does not divide the rows (evaluations, previews), all rows form one update, and copies of the last
    row pad it.
    """
    if min(num_rows, num_updates, num_ranks) < 1:
        raise ValueError(
            f"no row layout for {num_rows} rows, {num_updates} updates and {num_ranks} ranks: each must be at least 1"
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
    """The position of row 0, 1, ... in the concatenation of the ranks' rows: the inverse of `rank_rows`.

    A row with several copies has the position of its first one, so padding rows are left out.
    """
    places: dict[int, int] = {}
    for place, row in enumerate(chain.from_iterable(rows)):
        places.setdefault(row, place)
    return [places[row] for row in range(len(places))]
