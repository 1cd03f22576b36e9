"""The media that samples can have: conversion of an engine's previews, and reading stored samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from pathlib import Path

from unirl.tracking.images import ImageMedia, pixels
from unirl.tracking.measures import OF_EVALUATION
from unirl.tracking.samples import Media, SampleRow, SampleTable, row_of
from unirl.tracking.tables import Row
from unirl.tracking.texts import TextMedia
from unirl.tracking.videos import VideoMedia
from unirl.types.batch import Batch
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import ImagePreviews, Texts, VideoPreviews

MEDIA: Mapping[str, type[Media]] = {"image": ImageMedia, "text": TextMedia, "video": VideoMedia}


@singledispatch
def media_of(preview: Batch) -> Media:
    """Converts previews of an engine to media that can be stored. Each medium registers a function here."""
    raise TypeError(
        f"samples of type {type(preview).__name__} cannot be stored: register a function for them in "
        "unirl/tracking/media.py"
    )


@media_of.register
def _(preview: ImagePreviews) -> Media:
    return ImageMedia(pixels(preview.pixels))


@media_of.register
def _(preview: VideoPreviews) -> Media:
    return VideoMedia.of(preview)


@media_of.register
def _(preview: Texts) -> Media:
    return TextMedia(tuple(preview.texts))


def table_of_evaluation(result: EvalResult) -> SampleTable[Media]:
    """The samples of an evaluation with their scores."""
    scores = {name: values.tolist() for name, values in (result.components | result.logged_rewards).items()}
    rows = [
        SampleRow(
            sample_id=result.sample_ids[i],
            group_id=result.group_ids[i],
            prompt=result.prompts[i],
            images=result.prompt_image_uris[i] if result.prompt_image_uris else (),
            reward=reward,
            rewards={name: values[i] for name, values in scores.items()},
            facts=result.facts_of(i),
            track=result.track,
        )
        for i, reward in enumerate(result.rewards.tolist())
    ]
    return SampleTable(tuple(rows), media_of(result.media))


def metrics_of_evaluation(result: EvalResult) -> dict[str, float]:
    """The metrics to log of an evaluation: its scores, and the measures of its samples."""
    measures = media_of(result.media).measures()
    return result.metrics() | {OF_EVALUATION[name]: value for name, value in measures.items()}


def read_samples(rows: Sequence[Row], folder: Path) -> SampleTable[Media]:
    """Reads samples back from the rows of a manifest or of scores.json and the files in `folder`."""
    parsed = tuple(map(row_of, rows))
    return SampleTable(parsed, MEDIA[parsed[0].medium].read(parsed, folder))
