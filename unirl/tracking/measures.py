"""Measures of samples for alarms: the mean distance between samples, and the fine detail of images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL import Image

OF_EVALUATION = {"diversity": "eval/diversity", "fine_detail": "eval/fine_detail"}
"""Measures to the metrics of an evaluation that have them."""
SIDE = 8
"""Pixels per side of the small images that are compared."""
PIECE = 3
"""Letters of the pieces of texts that are compared."""


def image_measures(images: np.ndarray) -> dict[str, float]:
    """Diversity and fine detail of images [B, H, W, 3] uint8.

    Diversity is the mean over pairs of the root mean squared difference of two images of 8 x 8 pixels, levels in
    [0, 1]. Fine detail is the mean squared difference of the images from their averages over 3 x 3 pixels.
    """
    small = np.stack([np.asarray(Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BOX)) for each in images])
    detail = float(np.mean([fine_detail(each) for each in images]))
    measures = {"fine_detail": detail}
    if len(images) > 1:
        flat = small.reshape(len(small), -1) / 255
        distances = [float(np.sqrt(np.mean((a - b) ** 2))) for a, b in combinations(flat, 2)]
        measures["diversity"] = float(np.mean(distances))
    return measures


def fine_detail(image: np.ndarray) -> float:
    """Mean squared difference of an image [H, W, 3] uint8, levels in [0, 1], from its averages over 3 x 3 pixels."""
    levels = image.astype(np.float64) / 255
    edged = np.pad(levels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = edged[:-2] + edged[1:-1] + edged[2:]
    mean = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
    return float(np.mean((levels - mean) ** 2))


def text_measures(texts: Sequence[str]) -> dict[str, float]:
    """Diversity of texts: the mean over pairs of the share of three-letter pieces that not both texts have.

    This is one minus Jaccard's index of two sets. Texts that are too short for a piece are one piece.
    """
    if len(texts) < 2:
        return {}
    pieces = [_pieces(text) for text in texts]
    return {"diversity": float(np.mean([1 - len(a & b) / len(a | b) for a, b in combinations(pieces, 2)]))}


def _pieces(text: str) -> set[str]:
    return {text[start : start + PIECE] for start in range(max(len(text) - PIECE + 1, 1))}
