"""The main memory that saves of checkpoints need in each training process."""

from __future__ import annotations

import math

from unirl.plan.cost import MASTER_BYTES, Settings, Sizes
from unirl.plan.devices import GIB


def saved_bytes(sizes: Sizes, settings: Settings) -> dict[str, float]:
    """Bytes that one training process saves in a checkpoint, by the stem of the file. Value heads are negligible."""
    weights = sizes.trainable_parameters * MASTER_BYTES / settings.num_shards
    parts = {
        "weights": weights,
        "optimizer": 2 * weights * sizes.is_trained,
        "snapshots": sizes.num_snapshots * weights,
    }
    return {stem: size for stem, size in parts.items() if size}


def copied_for_saves(sizes: Sizes, settings: Settings) -> dict[str, float]:
    """GiB of main memory that one training process has for copies of what it saves, by the stem of the file.

    Those of saves in the background lie in pinned memory, which PyTorch allocates in powers of two. Other saves copy
    one file at a time, so the largest one counts.
    """
    saved = saved_bytes(sizes, settings)
    if sizes.saves_in_background:
        return {stem: 2.0 ** math.ceil(math.log2(size)) / GIB for stem, size in saved.items()}
    largest = max(saved, key=lambda stem: saved[stem])
    return {largest: saved[largest] / GIB}
