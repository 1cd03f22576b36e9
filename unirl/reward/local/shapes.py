"""Rewards pictures of one coloured shape for showing what was asked, by a detector that reads nothing but the pixels.

The largest blob on the dark ground is named by its colour (nearest palette entry), its kind (the silhouette that
overlaps it best) and its place (the side of the middle that it is on). What cannot be told is None: never right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.types.reward import RewardRequest, RewardResponse

Array = NDArray[np.float64]
Region = Callable[[Array, Array], NDArray[np.bool_]]

GROUND = (0.07, 0.08, 0.12)
PALETTE = {
    "red": (0.90, 0.16, 0.16),
    "green": (0.14, 0.72, 0.25),
    "blue": (0.18, 0.36, 0.95),
    "yellow": (0.96, 0.85, 0.16),
    "purple": (0.66, 0.22, 0.82),
    "white": (0.94, 0.94, 0.94),
}
# Points (u right, v down) that belong to a shape; each fills the square from -1 to 1.
SHAPES: Mapping[str, Region] = {
    "circle": lambda u, v: u * u + v * v <= 1.0,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 1.0,
    "triangle": lambda u, v: (v <= 1.0) & (2.0 * np.abs(u) <= v + 1.0),
    "cross": lambda u, v: (np.maximum(np.abs(u), np.abs(v)) <= 1.0) & (np.minimum(np.abs(u), np.abs(v)) <= 0.34),
}
PLACES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}

SUPERSAMPLE = 5
TEMPLATE_SIZE = 16
MAX_ASPECT = 1.4
"""Longest side over shortest, beyond which a silhouette is stretched too far to have a name."""


def coverage(shape: str, size: int, center: tuple[float, float], half: tuple[float, float]) -> Array:
    """[size, size] share of each pixel that the shape covers; center (x, y) and half (width, height) in pixels."""
    at = (np.arange(size * SUPERSAMPLE) + 0.5) / SUPERSAMPLE
    u, v = np.meshgrid((at - center[0]) / half[0], (at - center[1]) / half[1])
    cover = SHAPES[shape](u, v).astype(np.float64)
    return cover.reshape(size, SUPERSAMPLE, size, SUPERSAMPLE).mean(axis=(1, 3))


@cache
def template(shape: str) -> Array:
    """[TEMPLATE_SIZE, TEMPLATE_SIZE] coverage of the shape's own bounding box."""
    middle = TEMPLATE_SIZE / 2
    return coverage(shape, TEMPLATE_SIZE, (middle, middle), (middle, middle))


@dataclass(frozen=True)
class Sighting:
    """What the detector saw; None where it could not tell."""

    color: str | None = None
    shape: str | None = None
    place: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShapesSpec:
    """How sure the detector must be."""

    min_contrast: float = 0.3
    """Distance from the ground color, in RGB with channels in [0, 1], beyond which a pixel is part of something."""
    min_area: float = 0.03
    """Smallest blob that counts, as a share of the picture."""
    max_area: float = 0.6
    """Largest blob that counts: a picture painted over shows no shape."""
    max_color_distance: float = 0.25
    """Farthest a blob's median color may lie from a palette entry."""
    min_overlap: float = 0.7
    """Least intersection over union of blob and silhouette."""
    max_residual: float = 0.04
    """Largest root mean square of what one flat shape leaves unexplained: texture, specks, a second shape."""
    min_offset: float = 0.1
    """Least distance of the blob from the middle, as a share of the picture's side, to be on a side."""


class ShapesRewardScorer(RewardScorer):
    """The share of what was asked that the picture shows; metadata says what was: any of "color", "shape", "place"."""

    reads = ("images", "metadata")

    def __init__(self, *, config: ShapesSpec = ShapesSpec()) -> None:
        self.config = config

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.metadata is not None
        pictures = request.images.permute(0, 2, 3, 1).double().cpu().numpy()
        right = [
            matches(sight(picture, self.config), asked, sample)
            for picture, asked, sample in zip(pictures, request.metadata, request.sample_ids, strict=True)
        ]
        share = torch.tensor([sum(row) / len(row) for row in right])
        exact = torch.tensor([float(all(row)) for row in right])
        return RewardResponse(total=share, components={"share": share, "exact": exact})


def matches(seen: Sighting, asked: Mapping[str, Any], sample_id: str) -> list[bool]:
    """Per attribute asked for, whether it was seen."""
    known = {"color": PALETTE, "shape": SHAPES, "place": PLACES}
    wanted = {key: asked[key] for key in known if key in asked}
    for key, value in wanted.items():
        if value not in known[key]:
            raise RewardError(
                f"sample {sample_id!r} asks for {key} {value!r}: the shapes reward knows {', '.join(known[key])}"
            )
    if not wanted:
        raise RewardError(
            f"sample {sample_id!r} has metadata {dict(asked)}: the shapes reward needs one of {', '.join(known)}"
        )
    return [asdict(seen)[key] == value for key, value in wanted.items()]


def sight(picture: Array, spec: ShapesSpec = ShapesSpec()) -> Sighting:
    """What one picture [H, W, 3] in [0, 1] shows."""
    blob = largest_blob(np.linalg.norm(picture - GROUND, axis=-1) > spec.min_contrast)
    if not spec.min_area <= blob.mean() <= spec.max_area:
        return Sighting()
    paint = np.median(picture[blob], axis=0)
    cover = flat_cover(picture, blob, paint)
    residual = picture - GROUND - cover[..., None] * (paint - GROUND)
    clean = bool(np.sqrt(np.square(residual).mean()) <= spec.max_residual)
    return Sighting(
        color=nearest_color(paint, spec.max_color_distance),
        shape=best_shape(cover, spec.min_overlap) if clean else None,
        place=side(cover, spec.min_offset),
    )


def largest_blob(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The largest 4-connected component of the mask, itself a mask."""
    from scipy.ndimage import label

    labels, count = label(mask)
    if count == 0:
        return mask
    return np.asarray(labels == 1 + np.argmax(np.bincount(labels.ravel())[1:]))


def flat_cover(picture: Array, blob: NDArray[np.bool_], paint: Array) -> Array:
    """[H, W] how much of each pixel is paint rather than ground, in [0, 1]; zero away from the blob."""
    from scipy.ndimage import binary_dilation

    axis = paint - GROUND
    share = ((picture - GROUND) @ axis / (axis @ axis)).clip(0.0, 1.0)
    return np.asarray(np.where(binary_dilation(blob, iterations=1), share, 0.0))


def nearest_color(paint: Array, max_distance: float) -> str | None:
    """The palette's name for a color, None when nothing is near."""
    distance = {name: float(np.linalg.norm(paint - entry)) for name, entry in PALETTE.items()}
    name = min(distance, key=distance.__getitem__)
    return name if distance[name] <= max_distance else None


@dataclass(frozen=True)
class Box:
    """A bounding box in pixels, to a fraction of one."""

    x: float
    y: float
    width: float
    height: float


def box(cover: Array) -> Box:
    """The bounding box of the paint."""
    x, width = extent(cover.max(axis=0))
    y, height = extent(cover.max(axis=1))
    return Box(x, y, width, height)


def extent(profile: Array) -> tuple[float, float]:
    """Where the paint along one axis begins, and its length: a pixel that is a third paint counts a third."""
    painted = np.where(profile > 0.15, profile, 0.0)
    first = int(np.flatnonzero(painted)[0])
    return first + 1.0 - float(painted[first]), float(painted.sum())


def best_shape(cover: Array, min_overlap: float) -> str | None:
    """The silhouette that fits the cover best, None when none fits."""
    b = box(cover)
    if max(b.height, b.width) > MAX_ASPECT * min(b.height, b.width):
        return None
    overlap = overlaps(cover, b)
    name = max(overlap, key=overlap.__getitem__)
    return name if overlap[name] >= min_overlap else None


def overlaps(cover: Array, b: Box) -> dict[str, float]:
    """Each silhouette's intersection over union with the cover in its bounding box b."""
    from scipy.ndimage import map_coordinates

    at = (np.arange(TEMPLATE_SIZE) + 0.5) / TEMPLATE_SIZE
    rows, columns = np.meshgrid(b.y + at * b.height - 0.5, b.x + at * b.width - 0.5, indexing="ij")
    seen = map_coordinates(cover, [rows, columns], order=1)
    return {name: intersection_over_union(seen, template(name)) for name in SHAPES}


def intersection_over_union(one: Array, other: Array) -> float:
    """Overlap of two soft masks, in [0, 1]."""
    return float(np.minimum(one, other).sum() / np.maximum(one, other).sum())


def side(cover: Array, min_offset: float) -> str | None:
    """The side of the middle that the bounding box's center is farthest on, None near the middle."""
    b, (height, width) = box(cover), cover.shape
    dx, dy = (b.x + b.width / 2) / width - 0.5, (b.y + b.height / 2) / height - 0.5
    reach = {name: x * dx + y * dy for name, (x, y) in PLACES.items()}
    name = max(reach, key=reach.__getitem__)
    return name if reach[name] >= min_offset else None
