"""The scale of a robot's numbers: statistics of the data, in the files that publishers put beside weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from unirl.config.errors import InvalidValueError
from unirl.models.loading.hub import read_json

EPS = 1e-8
"""Added to a std, as PI0Processor and lerobot do."""
PROCESSOR, OPENPI = "processor_config.json", "norm_stats.json"
NORMALIZER = "policy_preprocessor_step_*_normalizer_processor.safetensors"
Bounds = tuple[str, str]
QUANTILES, EXTREMES = ("q01", "q99"), ("min", "max")
"""The statistics that may become -1 and 1."""
Statistics = Mapping[str, Tensor]
"""Tensors [n] by `state_mean`, `state_std`, `state_q01`, `state_q99`, and the same of `actions`."""


@dataclass(frozen=True)
class Scale:
    """x becomes (x - mean) / std. Mean and std are those of the data, or have two other statistics become -1 and 1."""

    mean: Tensor  # [n]
    std: Tensor  # [n]

    @classmethod
    def of(
        cls, statistics: Statistics, name: str, size: int, key: str, place: str, *, bounds: Bounds | None = None
    ) -> Scale:
        """The scale of `name` in the statistics. Without its two tensors, numbers stay as they are.

        Args:
            name: `state` or `actions`.
            size: n.
            key: the setting of the bundle that gives n, for errors.
            place: of the statistics, for errors.
            bounds: the two statistics that become -1 and 1. None: mean and std.

        Raises:
            InvalidValueError: 2004, the statistics have another number of entries.
        """
        names = [f"{name}_{part}" for part in (bounds or ("mean", "std"))]
        first, second = (statistics.get(each) for each in names)
        if first is None or second is None:
            return cls(torch.zeros(size), torch.ones(size) - EPS)
        if len(first) != size or len(second) != size:
            raise InvalidValueError(
                f"{key}={size}: {place} has {names[0]} of {len(first)} and {names[1]} of {len(second)} numbers. Set "
                f"{key}={len(first)}, or give statistics of the robot of this recipe"
            )
        if bounds is not None:
            return cls((first + second) / 2, (second - first) / 2)
        return cls(first, second)


def statistics_in(root: Path) -> Statistics:
    """The statistics of a checkpoint: those of transformers, of lerobot, or of openpi. Empty: it has none.

    Raises:
        InvalidValueError: 2004, there are several files of openpi, of several robots.
    """
    if (root / PROCESSOR).is_file():
        saved = read_json(root / PROCESSOR)
        names = [f"{name}_{part}" for name in ("state", "actions") for part in ("mean", "std")]
        return {name: torch.tensor(saved[name]).float() for name in names if saved.get(name) is not None}
    for path in sorted(root.glob(NORMALIZER)):
        return {
            f"{ours}_{key.rpartition('.')[2]}": tensor.float()
            for key, tensor in load_file(path).items()
            for theirs, ours in (("observation.state.", "state"), ("action.", "actions"))
            if key.startswith(theirs)
        }
    found = sorted(root.rglob(OPENPI))
    if len(found) > 1:
        raise InvalidValueError(
            f"bundle.path={root}: there are statistics of several robots, {', '.join(map(str, found))}. Keep the file "
            "of the robot of this recipe"
        )
    return {
        f"{name}_{part}": torch.tensor(numbers).float()
        for path in found
        for name, parts in read_json(path)["norm_stats"].items()
        for part, numbers in parts.items()
    }
