"""What an evaluation found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Scores of held-out prompts, a row per sample."""

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    rewards: Tensor  # [B] float32
    components: dict[str, Tensor]  # name -> [B] float32
    images: Tensor  # [B, 3, H, W] uint8
    watched: dict[str, Tensor] = field(default_factory=dict)  # name -> [B] float32, NaN = not scored
    unscored: int = 0
    """Samples that could not be scored, which no other field counts."""

    @property
    def mean(self) -> float:
        """The mean reward."""
        return float(self.rewards.double().mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean over prompts, whose samples are not independent."""
        groups: dict[str, list[int]] = {}
        for i, group in enumerate(self.group_ids):
            groups.setdefault(group, []).append(i)
        means = [float(self.rewards[rows].double().mean()) for rows in groups.values()]
        if len(means) < 2:
            return 0.0
        centre = sum(means) / len(means)
        return math.sqrt(sum((m - centre) ** 2 for m in means) / (len(means) - 1) / len(means))

    def metrics(self) -> dict[str, float]:
        """The numbers to log, under `eval/`."""
        found = {
            "eval/reward_mean": self.mean,
            "eval/reward_stderr": self.standard_error,
            "eval/reward_min": float(self.rewards.min()),
            "eval/reward_max": float(self.rewards.max()),
        }
        scores = self.components | {name: values[values.isfinite()] for name, values in self.watched.items()}
        found |= {f"eval/{name}_mean": float(values.double().mean()) for name, values in scores.items() if len(values)}
        return found | ({"eval/unscored": float(self.unscored)} if self.unscored else {})
