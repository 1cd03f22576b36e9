"""Samples as they are kept for people to look at: a row of facts and a medium each: a picture, a video or a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from unirl.tracking.mirrors import Mirrors
from unirl.tracking.tables import finite, read_rows, replace_text

Fact = float | bool | str
MediaT = TypeVar("MediaT", bound="Media")


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """What is known of one sample. `medium`, and `file` or `text`, are filled in when it is written."""

    sample_id: str
    group_id: str
    prompt: str
    pictures: tuple[str, ...] = ()
    """Where the pictures lie that the prompt is about."""
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Component scores by name."""
    advantage: float | None = None
    weight: float = 1.0
    weight_version: int | None = None
    """Optimizer updates that the sampling weights had seen."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What else is known of it, such as the number of its tokens."""
    track: str = "image"
    parent_id: str | None = None
    medium: str = "picture"
    file: str = ""
    """The picture, or the video as animated WebP, beside the manifest."""
    text: str = ""


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt."""

    group_id: str
    prompt: str
    pictures: tuple[str, ...]
    rows: tuple[int, ...]
    rewards: tuple[float, ...]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def best_first(self) -> list[int]:
        """Row numbers by falling reward."""
        ranked = sorted(zip(self.rewards, self.rows, strict=True), key=lambda pair: (-pair[0], pair[1]))
        return [row for _, row in ranked]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a line of a manifest says of a row's medium: where it is, or the text itself."""

    file: str = ""
    text: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the medium knows of itself, beside what is known of the row."""


class Media(Protocol):
    """What the samples of a table are, an entry per row. Whoever keeps, reads or shows samples asks nothing else."""

    kind: ClassVar[str]
    """The word by which a manifest names it."""

    def __len__(self) -> int: ...

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> Self:
        """The inverse of `write`: from rows of a manifest, and the files beside it."""
        ...

    def write(self, names: Sequence[str], folder: Path) -> list[Entry]:
        """Write what a line of a manifest cannot hold into files; gives back what the line of each row holds.

        `names`: of the files, without their suffix.
        """
        ...

    def compares_with(self, other: Media) -> bool:
        """Whether the two can stand on one page, row beside row."""
        ...

    def page(self, table: SampleTable[Any], folder: Path, title: str) -> Path:
        """All samples of `table`, whose media these are, on one page for people, which is written into `folder`."""
        ...

    def comparison(self, before: SampleTable[Any], after: SampleTable[Any], sides: Sides, folder: Path) -> Path:
        """The samples of two evaluations on one page; `after` is the table whose media these are."""
        ...

    def album(self, prompts: Sequence[str], folder: Path) -> Path:
        """The media as files that any program opens, equally many for each prompt, and one page of all.

        Gives back the page. Nothing else is known of the samples.
        """
        ...

    def lines(self) -> list[str]:
        """What of them a console can show."""
        ...

    def remarks(self) -> list[str]:
        """What a person should know, once, about how they are kept."""
        ...

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """Show the samples, whose page has been written, where mirrors show such media."""
        ...


Sides = tuple[str, str]
"""What two evaluations are called that stand beside each other."""


@dataclass(frozen=True)
class MirroredPage:
    """A page that mirrors show: of which step, under which key, and what it is."""

    step: int
    key: str
    title: str
    path: Path


@dataclass(frozen=True)
class SampleTable(Generic[MediaT]):
    """Rows of facts and their media."""

    rows: tuple[SampleRow, ...]
    media: MediaT

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.media), f"{len(self.rows)} rows, {len(self.media)} {self.media.kind}s"

    @property
    def mean_reward(self) -> float:
        return sum(row.reward for row in self.rows) / len(self.rows)

    def groups(self) -> list[SampleGroup]:
        """Samples by group, in the order of their first row."""
        numbers: dict[str, list[int]] = {}
        for number, row in enumerate(self.rows):
            numbers.setdefault(row.group_id, []).append(number)
        return [self._group(rows) for rows in numbers.values()]

    def _group(self, rows: list[int]) -> SampleGroup:
        first = self.rows[rows[0]]
        rewards = tuple(self.rows[row].reward for row in rows)
        return SampleGroup(first.group_id, first.prompt, first.pictures, tuple(rows), rewards)

    def saved(self, folder: Path) -> SampleTable[MediaT]:
        """Writes the media as `p03-s05` (prompt 3, sample 5) and so on; gives back the table that says where they are.

        Rows of a manifest hold the rest; see `write_manifest`.
        """
        groups = enumerate(self.groups())
        names = {row: f"p{p:02d}-s{s:02d}" for p, group in groups for s, row in enumerate(group.rows)}
        written = self.media.write([names[row] for row in range(len(self.rows))], folder)
        kept = zip(self.rows, written, strict=True)
        rows = [_kept(row, self.media.kind, entry) for row, entry in kept]
        return replace(self, rows=tuple(rows))


def _kept(row: SampleRow, kind: str, entry: Entry) -> SampleRow:
    return replace(row, medium=kind, file=entry.file, text=entry.text, facts={**row.facts, **entry.facts})


def pairs_of(before: SampleTable[Any], after: SampleTable[Any]) -> list[tuple[SampleGroup, SampleGroup]]:
    """The groups that both tables have, of the same prompt. Raises ValueError when there is none.

    Prompts may read alike and differ in what they show, so it is the group that counts.
    """
    later = {(group.group_id, group.prompt): group for group in after.groups()}
    known = [(old, later.get((old.group_id, old.prompt))) for old in before.groups()]
    found = [(old, new) for old, new in known if new is not None]
    if not found:
        raise ValueError("no prompt was evaluated both before and after; a before/after page needs the same prompts")
    return found


def write_manifest(table: SampleTable[Any], path: Path) -> None:
    """One JSON line per sample."""
    replace_text(path, "".join(json.dumps(finite(asdict(row)), sort_keys=True) + "\n" for row in table.rows))


def manifest_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a manifest."""
    return read_rows(path)
