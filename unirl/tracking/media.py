"""The kinds of media that samples may be: from what an engine shows, and back from what was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

from unirl.tracking.images import PictureMedia, pixels
from unirl.tracking.samples import Media, SampleRow, SampleTable
from unirl.tracking.texts import TextMedia
from unirl.tracking.videos import VideoMedia
from unirl.types.batch import Batch
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import ImagePreviews, Texts, VideoPreviews

KINDS: Mapping[str, type[Media]] = {"picture": PictureMedia, "text": TextMedia, "video": VideoMedia}


@singledispatch
def media_of(preview: Batch) -> Media:
    """What an engine shows of samples, as it is kept. A further kind of media registers its own function here."""
    raise TypeError(
        f"samples that are {type(preview).__name__} cannot be kept: write their kind in unirl/tracking/media.py"
    )


@media_of.register
def _(preview: ImagePreviews) -> Media:
    return PictureMedia(pixels(preview.pixels))


@media_of.register
def _(preview: VideoPreviews) -> Media:
    return VideoMedia.of(preview)


@media_of.register
def _(preview: Texts) -> Media:
    return TextMedia(tuple(preview.texts))


def table_of_evaluation(result: EvalResult) -> SampleTable[Media]:
    """What an evaluation found, row by row."""
    scores = {name: values.tolist() for name, values in (result.components | result.logged_rewards).items()}
    rows = [
        SampleRow(
            sample_id=result.sample_ids[i],
            group_id=result.group_ids[i],
            prompt=result.prompts[i],
            pictures=result.prompt_image_uris[i] if result.prompt_image_uris else (),
            reward=reward,
            rewards={name: values[i] for name, values in scores.items()},
            facts=result.facts_of(i),
        )
        for i, reward in enumerate(result.rewards.tolist())
    ]
    return SampleTable(tuple(rows), media_of(result.media))


def read_samples(rows: Sequence[Mapping[str, Any]], folder: Path) -> SampleTable[Media]:
    """The table that rows of a manifest or of scores.json, and the files beside them, make."""
    parsed = tuple(_row(entry) for entry in rows)
    return SampleTable(parsed, KINDS[parsed[0].medium].read(parsed, folder))


def _row(entry: Mapping[str, Any]) -> SampleRow:
    """A number that JSON has no word for is kept as a text."""
    scores = {name: float(score) for name, score in entry["rewards"].items()}
    pictures = tuple(entry.get("pictures", ()))
    return SampleRow(**{**entry, "reward": float(entry["reward"]), "rewards": scores, "pictures": pictures})
