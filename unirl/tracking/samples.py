"""Samples as they are kept for people to look at: a row of facts and a picture each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unirl.tracking.tables import finite, read_rows, replace_text
from unirl.types.evaluation import EvalResult

LOSSLESS_UP_TO = 160
"""Pictures with no side longer than this are kept exactly; larger ones as good WebP."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """What is known of one sample. `file` is filled in when it is written."""

    sample_id: str
    group_id: str
    prompt: str
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Component scores by name."""
    advantage: float | None = None
    weight: float = 1.0
    weight_version: int | None = None
    """Optimizer updates that the sampling weights had seen."""
    track: str = "image"
    parent_id: str | None = None
    file: str = ""


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt."""

    prompt: str
    rows: tuple[int, ...]
    rewards: tuple[float, ...]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def best_first(self) -> list[int]:
        """Row numbers by falling reward."""
        ranked = sorted(zip(self.rewards, self.rows, strict=True), key=lambda pair: (-pair[0], pair[1]))
        return [row for _, row in ranked]


@dataclass(frozen=True)
class SampleTable:
    """Rows of facts and their pictures."""

    rows: tuple[SampleRow, ...]
    images: np.ndarray  # [B, H, W, 3] uint8

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.images), f"{len(self.rows)} rows, {len(self.images)} images"
        assert self.images.dtype == np.uint8 and self.images.ndim == 4 and self.images.shape[3] == 3

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
        return SampleGroup(self.rows[rows[0]].prompt, tuple(rows), tuple(self.rows[row].reward for row in rows))


def pixels(images: Tensor) -> np.ndarray:
    """[B, H, W, 3] uint8 of images [B, 3, H, W], uint8 or float in [0, 1]."""
    levels = images if not images.is_floating_point() else (images.clamp(0, 1) * 255).round()
    return levels.byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()


def table_of_evaluation(result: EvalResult) -> SampleTable:
    """What an evaluation found, row by row."""
    scores = {name: values.tolist() for name, values in (result.components | result.watched).items()}
    rows = [
        SampleRow(
            sample_id=result.sample_ids[i],
            group_id=result.group_ids[i],
            prompt=result.prompts[i],
            reward=reward,
            rewards={name: values[i] for name, values in scores.items()},
        )
        for i, reward in enumerate(result.rewards.tolist())
    ]
    return SampleTable(tuple(rows), pixels(result.images))


def save_pictures(table: SampleTable, folder: Path) -> SampleTable:
    """Writes `p03-s05.webp` (prompt 3, sample 5) and so on; gives back the table with the files' names."""
    groups = enumerate(table.groups())
    names = {row: f"p{p:02d}-s{s:02d}.webp" for p, group in groups for s, row in enumerate(group.rows)}
    lossless = max(table.images.shape[1:3]) <= LOSSLESS_UP_TO
    for row, picture in enumerate(table.images):
        Image.fromarray(picture).save(folder / names[row], lossless=lossless, quality=90, method=0)
    return SampleTable(tuple(replace(row, file=names[i]) for i, row in enumerate(table.rows)), table.images)


def write_manifest(table: SampleTable, path: Path) -> None:
    """One JSON line per sample."""
    replace_text(path, "".join(json.dumps(finite(asdict(row)), sort_keys=True) + "\n" for row in table.rows))


def read_samples(rows: list[dict[str, Any]], folder: Path) -> SampleTable:
    """The table that rows of a manifest or of scores.json, and the pictures beside them, make."""
    parsed = tuple(SampleRow(**{**row, "reward": float(row["reward"])}) for row in rows)
    pictures = []
    for row in parsed:
        with Image.open(folder / row.file, formats=["WEBP"]) as picture:
            pictures.append(np.asarray(picture.convert("RGB")))
    return SampleTable(parsed, np.stack(pictures))


def manifest_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a manifest."""
    return read_rows(path)
