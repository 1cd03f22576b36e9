"""Samples that are stored for people to look at: each has a row of facts and a medium (image, video or text)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import msgspec

from unirl.tracking.mirrors import Mirrors
from unirl.tracking.tables import finite, replace_text
from unirl.types.rows import rows_by_key

Fact = float | bool | str
REWRITE = "rewrite"
"""The fact that holds the prompt from which a sample was drawn, where a prompt enhancer rewrote it."""
MediaT = TypeVar("MediaT", bound="Media", covariant=True)


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """The facts about one sample. `medium`, and `file` or `text`, are set when it is written."""

    sample_id: str
    group_id: str
    prompt: str
    images: tuple[str, ...] = ()
    """Paths or addresses of the images in the prompt."""
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Component scores by name."""
    advantage: float | None = None
    weight: float = 1.0
    weight_version: int | None = None
    """Number of optimizer updates after which the sampling weights were published."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Other facts, such as the number of tokens."""
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values along the sample by name, such as log-probs by token or denoising step."""
    pieces: tuple[str, ...] = ()
    """The text of each token, where a policy wrote the sample as tokens."""
    context: tuple[int, ...] = ()
    """The pieces that the policy did not write, such as answers of tools. They have no value in `series`."""
    track: str = ""
    parent_id: str | None = None
    medium: str = "image"
    file: str = ""
    """File name of the image or of the animated WebP, in the folder of the manifest."""
    text: str = ""


def row_of(entry: object) -> SampleRow:
    """The row of an entry of a manifest or of scores.json; `nan` and `inf` are stored as text. Unknown facts are left
    out.

    Raises ValueError for an entry that is no such row.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("rewards", {}), dict):
        raise ValueError("it is no object with the facts of a sample")
    try:
        scores = {name: float(score) for name, score in entry.get("rewards", {}).items()}
        return msgspec.convert({**entry, "reward": float(entry["reward"]), "rewards": scores}, SampleRow)
    except (KeyError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt."""

    group_id: str
    prompt: str
    images: tuple[str, ...]
    rows: tuple[int, ...]
    rewards: tuple[float, ...]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def best_first(self) -> list[int]:
        """Row numbers, highest reward first."""
        ranked = sorted(zip(self.rewards, self.rows, strict=True), key=lambda pair: (-pair[0], pair[1]))
        return [row for _, row in ranked]


class Media(Protocol):
    """The images, videos or texts of a table, one per row. Other code uses samples only through this protocol."""

    kind: ClassVar[str]
    """The name of the medium in a manifest."""

    def __len__(self) -> int: ...

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> Self:
        """Reads what `write` wrote, from the rows of a manifest and the files beside it."""
        ...

    def write(self, rows: Sequence[SampleRow], names: Sequence[str], folder: Path) -> list[SampleRow]:
        """Writes one file per row, or none if the manifest itself can hold the medium; returns the rows with `file`
        or `text`, and with facts about the medium.

        Args:
            names: file names without suffix.
        """
        ...

    def compares_with(self, other: Media) -> bool:
        """Returns True if both can be shown side by side."""
        ...

    def page(self, table: SampleTable[Self], folder: Path, title: str) -> Path:
        """Writes one page that shows all samples of `table`, which has these media; returns its path."""
        ...

    def comparison(self, before: SampleTable[Self], after: SampleTable[Self], sides: Sides, folder: Path) -> Path:
        """Writes one page that shows two evaluations side by side; `after` has these media."""
        ...

    def gallery(self, drawn: Gallery, folder: Path) -> Path:
        """Writes the media as files that any program can open, a manifest, and one page of all; returns the page."""
        ...

    def console_lines(self) -> list[str]:
        """The lines that a console can show; none by default."""
        return []

    def remarks(self) -> list[str]:
        """Warnings about how the media are stored; the tracker prints each once. None by default."""
        return []

    def measures(self) -> dict[str, float]:
        """`diversity` and `fine_detail` of these media, as far as they have them (unirl/tracking/measures.py)."""
        return {}

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """Sends the page and the first media to mirrors."""
        ...


@dataclass(frozen=True)
class Gallery:
    """How samples without rewards were drawn: equally many for each prompt, those of a prompt adjacent."""

    prompts: tuple[str, ...]
    per_prompt: int
    facts: Mapping[str, object]
    """What all samples share, such as seed, run and checkpoint."""
    rewrites: tuple[str, ...] = ()
    """The prompt from which each sample was drawn, if a prompt enhancer rewrote them."""

    @property
    def title(self) -> str:
        """The facts in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.facts.items())

    def of(self, number: int) -> dict[str, object]:
        """Prompt, number among the samples of the prompt, and facts of a sample."""
        return {
            "prompt": self.prompts[number // self.per_prompt],
            "sample": number % self.per_prompt,
            **({REWRITE: self.rewrites[number]} if self.rewrites else {}),
            **self.facts,
        }

    def name(self, number: int) -> str:
        """The name of the file of a sample, such as `p03-s05`, without its suffix."""
        return f"p{number // self.per_prompt:02d}-s{number % self.per_prompt:02d}"

    def write_manifest(self, path: Path, own: Sequence[Mapping[str, object]]) -> None:
        """Writes one JSON line per sample: what is its own, such as its file, and how it was drawn."""
        rows = [{**each, **self.of(number)} for number, each in enumerate(own)]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


Sides = tuple[str, str]
"""Names of two evaluations that are shown side by side."""


@dataclass(frozen=True)
class MirroredPage:
    """A page that mirrors show."""

    step: int
    key: str
    title: str
    path: Path


@dataclass(frozen=True)
class StepRewards:
    """The number and the mean reward of all samples of which a table holds a part."""

    count: int
    mean: float


@dataclass(frozen=True)
class SampleTable(Generic[MediaT]):
    """The facts and media of several samples."""

    rows: tuple[SampleRow, ...]
    media: MediaT
    step: StepRewards | None = None
    """All scored samples of the step, if the table may hold only some of them."""
    remark: str = ""
    """What pages say about the rewards, such as that a toy has random weights."""

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.media), f"{len(self.rows)} rows, {len(self.media)} {self.media.kind}s"

    @property
    def mean_reward(self) -> float:
        return sum(row.reward for row in self.rows) / len(self.rows)

    def reward_text(self) -> str:
        """`mean reward 0.512 of 64 samples`; of a part, `mean reward 0.500 of 16 of 64 samples (whole step: 0.512)`."""
        text = f"mean reward {self.mean_reward:.3f} of {self.count_text()}"
        if self.step is None or self.step.count == len(self.rows):
            return text
        return f"{text} (whole step: {self.step.mean:.3f})"

    def count_text(self) -> str:
        """`64 samples`; of a part, `16 of 64 samples`."""
        part = "" if self.step is None or self.step.count == len(self.rows) else f" of {self.step.count}"
        return f"{len(self.rows)}{part} samples"

    def best_groups(self) -> list[SampleGroup]:
        """Samples by group, highest mean reward first; equal ones in the order of their first row."""
        return sorted(self.groups(), key=lambda group: -group.mean_reward)

    def groups(self) -> list[SampleGroup]:
        """Samples by group, in the order of their first row."""
        return groups_of(self.rows)

    def saved(self, folder: Path) -> SampleTable[MediaT]:
        """Writes the media under names like `p03-s05` (prompt 3, sample 5); returns the table with the file names.

        `write_manifest` writes the rows.
        """
        groups = enumerate(self.groups())
        names = {row: f"p{p:02d}-s{s:02d}" for p, group in groups for s, row in enumerate(group.rows)}
        rows = [replace(row, medium=self.media.kind) for row in self.rows]
        return replace(self, rows=tuple(self.media.write(rows, [names[i] for i in range(len(rows))], folder)))


def groups_of(samples: Sequence[SampleRow]) -> list[SampleGroup]:
    """Samples by group, in the order of their first row."""
    groups = []
    for rows in rows_by_key(row.group_id for row in samples).values():
        first = samples[rows[0]]
        rewards = tuple(samples[row].reward for row in rows)
        groups.append(SampleGroup(first.group_id, first.prompt, first.images, tuple(rows), rewards))
    return groups


def pairs_of(before: SampleTable[Media], after: SampleTable[Media]) -> list[tuple[SampleGroup, SampleGroup]]:
    """The groups that both tables have. Raises ValueError if there is none.

    Groups are matched by id and text, since two prompts may have the same text and different images.
    """
    later = {(group.group_id, group.prompt): group for group in after.groups()}
    matches = [(old, later.get((old.group_id, old.prompt))) for old in before.groups()]
    pairs = [(old, new) for old, new in matches if new is not None]
    if not pairs:
        raise ValueError("no prompt was evaluated both before and after; a before/after page needs the same prompts")
    return pairs


MIN_ERRORS = 2.0
"""Standard errors from which a change of a mean is not put down to noise."""


def direction(old: SampleGroup, new: SampleGroup) -> int:
    """1 if the rewards of a prompt rose by more than their noise, -1 if they fell by more, else 0.

    The noise is the standard error of the mean of `after - before` over samples, whose k-th ones have the same noise.
    """
    changes = [b - a for a, b in zip(old.rewards, new.rewards, strict=False)]
    if len(changes) < 2:
        return 0
    mean = sum(changes) / len(changes)
    variance = sum((change - mean) ** 2 for change in changes) / (len(changes) - 1)
    return 0 if abs(mean) <= MIN_ERRORS * math.sqrt(variance / len(changes)) else 1 if mean > 0 else -1


def write_manifest(rows: Sequence[SampleRow], path: Path) -> None:
    """Writes one JSON line per sample."""
    replace_text(path, "".join(json.dumps(finite(vars(row)), sort_keys=True) + "\n" for row in rows))
