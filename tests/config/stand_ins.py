"""Classes that stand in for the parts of a recipe: each shows one way to declare keys."""

from __future__ import annotations

from collections import OrderedDict  # noqa: F401 - a re-exported foreign class, which no recipe may use
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import system  # noqa: F401 - a re-exported foreign function
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from nowhere import Unknown  # an annotation that only type checkers can read

made: list[str] = []
"""Names of the classes whose constructors ran."""


class Shape(Protocol):
    sides: int

    def area(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Square:
    """A dataclass: all fields are keys."""

    side: float = 1.0
    """Length in metres."""
    sides: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if self.side <= 0:
            raise ValueError(f"Square.side must be > 0, got {self.side}")

    def area(self) -> float:
        return self.side**2


@dataclass(frozen=True, kw_only=True)
class Blob:
    """No `area`: not a Shape."""

    side: float = 1.0


@dataclass(frozen=True, kw_only=True)
class HalfSampling:
    """Not a Sampling: keys alone."""

    samples_per_prompt: int = 16
    seed: int = 0
    evaluation_keys: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int = 3
    """How many."""
    mode: Literal["fast", "slow"] = "fast"
    toy: ClassVar[Mapping[str, object]] = {"count": 1}

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Inner.count must be >= 1, got {self.count}")


@dataclass(frozen=True, kw_only=True)
class Range:
    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError(f"Range.low must be >= 0, got {self.low}")
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be < high={self.high}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    size: int
    """Required."""
    ratio: float = 0.5
    name: str | None = None
    flag: bool = False
    steps: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    table: dict[str, float] = field(default_factory=dict)
    inner: Inner = Inner()
    shape: Shape | None = None
    shapes: list[Shape] = field(default_factory=list)
    anything: Any = None


class Worker:
    """A plain class: before `*` wired, after it keys."""

    def __init__(self, engine: Unknown, seed: int = 0, *, depth: int = 1, inner: Inner | None = None) -> None:
        """
        Args:
            depth: how deep to dig,
                in layers.
        """
        made.append("Worker")
        self.engine, self.seed, self.depth, self.inner = engine, seed, depth, inner
        if depth < 1:
            raise ValueError(f"depth must be >= 1, got {depth}")

    @classmethod
    def shallow(cls, engine: object, *, inner: Inner | None = None) -> Worker:
        return cls(engine, depth=1, inner=inner)

    @staticmethod
    def not_for_recipes() -> None: ...

    def nor_this(self) -> None: ...


class Nested:
    def __init__(self, *, worker: Worker) -> None:
        self.worker = worker


class Sloppy:
    def __init__(self, **anything: object) -> None: ...


def function() -> None: ...
