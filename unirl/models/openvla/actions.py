"""Actions as tokens: the last tokens of the vocabulary are bins of numbers, which statistics of a data set scale.

Kim et al. 2024, OpenVLA (arXiv:2406.09246, section 3.2). With 256 edges from -1 to 1 there are 255 bins, so that two
tokens stand for the last one:

    bin b in 0 ... 255   token = V - 1 - b   number = centre of bin min(b, 254)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError, NotFoundError, did_you_mean
from unirl.models.loading.hub import read_json

STATISTICS = "dataset_statistics.json"
"""The file with the statistics of the data that a checkpoint was tuned on. It adds to `norm_stats` of config.json."""


def bin_centres(num_edges: int) -> Tensor:
    """[num_edges] float32, the number of each token by its bin. The last bin has two tokens."""
    edges = torch.linspace(-1, 1, num_edges, dtype=torch.float64)
    centres = (edges[:-1] + edges[1:]) / 2
    return torch.cat([centres, centres[-1:]]).float()


@dataclass(frozen=True)
class ActionScale:
    """How numbers in [-1, 1] become those of a robot: the 1st and the 99th percentile of the data are -1 and 1."""

    low: Tensor  # [A] 1st percentile
    high: Tensor  # [A] 99th percentile
    scaled: Tensor  # [A] bool, False where the number is an action as it is, such as that of a gripper

    @property
    def size(self) -> int:
        """A."""
        return len(self.low)

    def apply(self, numbers: Tensor) -> Tensor:
        """[..., A] actions of the robot."""
        return torch.where(self.scaled, 0.5 * (numbers + 1) * (self.high - self.low) + self.low, numbers)


def statistics_of(config: Mapping[str, Any], root: Path | None) -> dict[str, Any]:
    """The statistics of a checkpoint by the name of their data set."""
    tuned = read_json(root / STATISTICS) if root is not None and (root / STATISTICS).is_file() else {}
    return {**(config.get("norm_stats") or {}), **tuned}


def scale_of(statistics: Mapping[str, Any], key: str, place: str) -> ActionScale:
    """The scale of the data set `key`.

    Raises:
        InvalidValueError: 2004, the checkpoint has no statistics of it.
        NotFoundError: 4001, they lack percentiles, or these disagree in length.
    """
    if key not in statistics:
        raise InvalidValueError(
            f"bundle.unnorm_key={key}: {place} has statistics of {', '.join(sorted(statistics)) or 'no data set'}."
            f"{did_you_mean(key, statistics)} Name one of these, or leave out bundle.unnorm_key for actions in [-1, 1]"
        )
    action = statistics[key].get("action", {})
    low, high = (action.get(name) for name in ("q01", "q99"))
    if not isinstance(low, Sequence) or not isinstance(high, Sequence) or len(low) != len(high):
        raise NotFoundError(f"{place}: the statistics of {key} have no action with q01 and q99 of equal length")
    scaled = action.get("mask") or [True] * len(low)
    return ActionScale(torch.tensor(low).float(), torch.tensor(high).float(), torch.tensor(scaled, dtype=torch.bool))
