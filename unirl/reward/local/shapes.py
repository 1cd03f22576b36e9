"""Rewards images of one colored shape for showing the requested attributes, by a detector that reads only the pixels.

The detector names the color of the largest blob on the dark background (the nearest palette entry), its shape (the
silhouette that fits it with the smallest defect) and its place (the side of the image). An attribute that it cannot
name is None, which is never right. A ragged shape counts in part, since some spot of its outline is too far from the
silhouette. `tests/reward/data/shapes` has images with labels by eye, with which the detector is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unirl.config.errors import RewardError, did_you_mean
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import score_rows
from unirl.types.primitives import unit
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
# Points (u right, v down) that belong to a shape. Each shape fills the square from -1 to 1.
SHAPES: Mapping[str, Region] = {
    "circle": lambda u, v: u * u + v * v <= 1.0,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 1.0,
    "triangle": lambda u, v: (v <= 1.0) & (2.0 * np.abs(u) <= v + 1.0),
    "cross": lambda u, v: (np.maximum(np.abs(u), np.abs(v)) <= 1.0) & (np.minimum(np.abs(u), np.abs(v)) <= 0.34),
}
PLACES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {"color": tuple(PALETTE), "shape": tuple(SHAPES), "place": tuple(PLACES)}
"""Metadata key to the values that a prompt may request."""

SUPERSAMPLE = 5
FRAME = 20
"""Pixels along a side of the frame in which a blob is compared with the silhouettes."""
FRAME_HALF = 1.25
"""Half of the frame's side, in units of half a silhouette's side."""
SPOT = 2
"""Side of the spot whose difference counts as a defect, in pixels of the frame: an eighth of a silhouette's side."""
ALIGNMENT_STEPS = 2
MAX_ALIGNMENT = 0.3
"""Largest shift or stretch in one step of the alignment, in units of half a silhouette's side."""
MAX_ASPECT = 1.4
"""Largest ratio of the sides of a bounding box at which its shape is named."""


def coverage(shape: str, size: int, center: tuple[float, float], half: tuple[float, float]) -> Array:
    """Returns the share of each pixel that the shape covers [size, size].

    Args:
        center: (x, y) of the shape in pixels.
        half: half of (width, height) in pixels.
    """
    at = (np.arange(size * SUPERSAMPLE) + 0.5) / SUPERSAMPLE
    u, v = np.meshgrid((at - center[0]) / half[0], (at - center[1]) / half[1])
    cover = SHAPES[shape](u, v).astype(np.float64)
    return cover.reshape(size, SUPERSAMPLE, size, SUPERSAMPLE).mean(axis=(1, 3))


@cache
def silhouette(shape: str) -> Array:
    """Returns the coverage of the shape in its frame [FRAME, FRAME], as soft as a blob that was sampled there."""
    from scipy.ndimage import gaussian_filter

    middle, half = FRAME / 2, FRAME / 2 / FRAME_HALF
    return np.asarray(gaussian_filter(coverage(shape, FRAME, (middle, middle), (half, half)), 0.5))


@dataclass(frozen=True)
class Sighting:
    """The attributes that the detector named; None for an attribute that it could not name."""

    color: str | None = None
    shape: str | None = None
    place: str | None = None
    outline: float = 0.0
    """Credit for the shape: 1 for a clean outline, less for a ragged one, 0 without a shape."""


@dataclass(frozen=True, kw_only=True)
class ShapesSpec:
    min_contrast: float = 0.3
    """Distance from the background color, in RGB with channels in [0, 1], from which a pixel belongs to a blob."""
    min_area: float = 0.03
    """Smallest area of a blob, as a share of the image."""
    max_area: float = 0.6
    """Largest area of a blob, as a share of the image."""
    max_color_distance: float = 0.25
    """Largest distance of a blob's median color from a palette entry."""
    max_defect: float = 0.35
    """Largest defect of a clean shape. A defect is the mean difference between a blob and the fitted silhouette in the
    worst small spot, such as a bite or a bulge. The credit for a shape falls beyond this value, to 0 at twice it."""
    max_residual: float = 0.04
    """Largest root mean square of the residual of one flat shape, such as texture, specks or a second shape."""
    min_offset: float = 0.1
    """Smallest distance of a blob from the image's center, as a share of the image's side, to have a place."""


class ShapesRewardScorer(RewardScorer):
    """The share of the requested attributes that an image shows: "color", "shape" and "place" of the metadata.

    A ragged shape counts in part, so that a policy learns to draw cleaner ones. `exact` is 1 only if all attributes are
    right and the outline is clean.
    """

    reads = ("images", "metadata")
    reads_levels = True

    def __init__(self, *, config: ShapesSpec = ShapesSpec()) -> None:
        self.config = config

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.metadata is not None
        images, metadata = unit(request.images).permute(0, 2, 3, 1).double().cpu().numpy(), request.metadata

        def score_row(row: int) -> Mapping[str, float]:
            earned = credits(sight(images[row], self.config), requested_in(metadata[row]))
            return {"share": sum(earned) / len(earned), "exact": float(min(earned) == 1)}

        return score_rows(request, ("share", "exact"), score_row)

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        requested_in(metadata)


def requested_in(metadata: Mapping[str, object]) -> dict[str, object]:
    """Returns the requested value of each attribute in the metadata of a prompt.

    Raises RewardError when none is requested, or one that the detector does not know.
    """
    requested = {key: metadata[key] for key in ATTRIBUTES if key in metadata}
    for key, value in requested.items():
        if value not in ATTRIBUTES[key]:
            near = did_you_mean(value, ATTRIBUTES[key]) if isinstance(value, str) else ""
            raise RewardError(
                f"metadata {key!r} is {value!r}, which the shapes reward does not know.{near} Write one of "
                f"{', '.join(ATTRIBUTES[key])}"
            )
    if not requested:
        raise RewardError(
            f"no attribute that the shapes reward could look for in the metadata (keys: {sorted(metadata)}). Write one "
            f'or several of {", ".join(ATTRIBUTES)}, as in "metadata": {{"color": "red", "shape": "circle"}}'
        )
    return requested


def credits(sighting: Sighting, requested: Mapping[str, object]) -> list[float]:
    """Returns the credit for each requested attribute: 1 if it was detected, less for a ragged shape, otherwise 0."""
    full = {"color": 1.0, "shape": sighting.outline, "place": 1.0}
    return [full[key] if asdict(sighting)[key] == value else 0.0 for key, value in requested.items()]


def sight(image: Array, spec: ShapesSpec = ShapesSpec()) -> Sighting:
    """Returns the attributes of an image [H, W, 3] in [0, 1]."""
    blob = largest_blob(np.linalg.norm(image - GROUND, axis=-1) > spec.min_contrast)
    if not spec.min_area <= blob.mean() <= spec.max_area:
        return Sighting()
    paint = np.median(image[blob], axis=0)
    cover = flat_cover(image, blob, paint)
    residual = image - GROUND - cover[..., None] * (paint - GROUND)
    closeness = {name: -float(np.linalg.norm(paint - entry)) for name, entry in PALETTE.items()}
    flat = bool(np.sqrt(np.square(residual).mean()) <= spec.max_residual)
    shape, outline = best_shape(cover, spec.max_defect) if flat else (None, 0.0)
    return Sighting(largest(closeness, -spec.max_color_distance), shape, side(cover, spec.min_offset), outline)


def largest_blob(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns the largest 4-connected component of a mask, as a mask."""
    from scipy.ndimage import label

    labels, count = label(mask)
    if count == 0:
        return mask
    return np.asarray(labels == 1 + np.argmax(np.bincount(labels.ravel())[1:]))


def flat_cover(image: Array, blob: NDArray[np.bool_], paint: Array) -> Array:
    """Returns the share of paint in each pixel [H, W], in [0, 1]; zero outside of the blob and its border."""
    from scipy.ndimage import binary_dilation

    axis = paint - GROUND
    share = ((image - GROUND) @ axis / (axis @ axis)).clip(0.0, 1.0)
    return np.asarray(np.where(binary_dilation(blob, iterations=1), share, 0.0))


class Box(NamedTuple):
    """A bounding box in pixels, with subpixel precision."""

    x: float
    width: float
    y: float
    height: float


def box(cover: Array) -> Box:
    """Returns the bounding box of the paint."""
    return Box(*extent(cover.max(axis=0)), *extent(cover.max(axis=1)))


def extent(profile: Array) -> tuple[float, float]:
    """Returns the start and the length of the paint along one axis. A pixel counts with its share of paint."""
    painted = np.where(profile > 0.15, profile, 0.0)
    first = int(np.flatnonzero(painted)[0])
    return first + 1.0 - float(painted[first]), float(painted.sum())


def best_shape(cover: Array, max_defect: float) -> tuple[str | None, float]:
    """Returns the silhouette with the smallest defect and the quality of the outline.

    The shape is None if its defect is twice `max_defect` or more, or if the bounding box is too long.
    """
    b = box(cover)
    if max(b.height, b.width) > MAX_ASPECT * min(b.height, b.width):
        return None, 0.0
    outlines = {name: 2 - defect / max_defect for name, defect in defects(cover, b).items()}
    shape = largest(outlines, 0.0)
    return shape, min(1.0, outlines[shape]) if shape else 0.0


def defects(cover: Array, b: Box) -> dict[str, float]:
    """Returns the defect of the cover as each of the shapes: its largest difference from the aligned silhouette.

    The difference is the mean of |cover - silhouette| over a spot of the frame. A spot is so small that one bite, bulge
    or cut corner dominates it, and a good outline elsewhere does not make up for it.
    """
    from scipy.ndimage import uniform_filter

    result = {}
    for name in SHAPES:
        difference = np.abs(in_frame(cover, aligned(cover, b, name)) - silhouette(name))
        result[name] = float(uniform_filter(difference, SPOT, mode="constant").max())
    return result


def in_frame(cover: Array, b: Box) -> Array:
    """Returns the cover in the frame around b [FRAME, FRAME]."""
    height, width = cover.shape
    return bilinear(b.y, b.height, height) @ cover @ bilinear(b.x, b.width, width).T


def bilinear(start: float, length: float, size: int) -> Array:
    """Returns the weights [FRAME, size] of an axis' pixels in each pixel of the frame around a box on that axis."""
    at = start + (1 + frame_grid()) / 2 * length - 0.5
    return np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(size)))


def frame_grid() -> Array:
    """Returns the places of the frame's pixels along one axis [FRAME]; the silhouette reaches from -1 to 1."""
    return ((np.arange(FRAME) + 0.5) / FRAME * 2 - 1) * FRAME_HALF


def aligned(cover: Array, b: Box, shape: str) -> Box:
    """Returns the box, beginning at b, in which the silhouette fits the cover best, by least squares.

    The steps are those of Lucas and Kanade in the inverse compositional form (Baker and Matthews 2004).
    """
    for _ in range(ALIGNMENT_STEPS):
        step = alignment(shape) @ (in_frame(cover, b) - silhouette(shape)).ravel()
        dx, dy, wider, higher = step.clip(-MAX_ALIGNMENT, MAX_ALIGNMENT)
        width, height = b.width / (1 + wider), b.height / (1 + higher)
        x = b.x + b.width / 2 - dx * width / 2
        y = b.y + b.height / 2 - dy * height / 2
        b = Box(x - width / 2, width, y - height / 2, height)
    return b


@cache
def alignment(shape: str) -> Array:
    """Returns the matrix [4, FRAME * FRAME] that estimates (x, y, width, height) from a difference of images.

    It is the pseudoinverse of the derivatives of the silhouette with respect to shifts and relative stretches.
    """
    at = frame_grid()
    down, right = np.gradient(silhouette(shape), at[1] - at[0])
    derivatives = np.stack([right, down, right * at, down * at[:, None]], axis=-1)
    return np.linalg.pinv(derivatives.reshape(-1, 4))


def side(cover: Array, min_offset: float) -> str | None:
    """Returns the side of the image on which the bounding box's center is farthest out; None near the middle."""
    b, (height, width) = box(cover), cover.shape
    dx, dy = (b.x + b.width / 2) / width - 0.5, (b.y + b.height / 2) / height - 0.5
    return largest({name: x * dx + y * dy for name, (x, y) in PLACES.items()}, min_offset)


def largest(values: Mapping[str, float], least: float) -> str | None:
    """Returns the name of the largest value; None if it is below `least`."""
    name = max(values, key=values.__getitem__)
    return name if values[name] >= least else None
