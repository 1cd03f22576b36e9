"""Several scorers as one: a weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, did_you_mean
from unirl.reward.base import RewardScorer
from unirl.reward.service import checked_score, objective_of
from unirl.types.protocols import Capabilities, Scorer
from unirl.types.reward import RewardRequest, RewardResponse


class WeightedRewards(RewardScorer):
    """total = sum over scorers of weight x that scorer's total. Components keep their scorer's name as a prefix.

    A scorer of weight 0 is watched in the logs and teaches nothing.
    """

    def __init__(self, *, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        """One weight per scorer, by name."""
        for name in weights.keys() - scorers.keys():
            raise ConfigError(
                f"weights.{name} names no scorer.{did_you_mean(name, scorers)} There are {sorted(scorers)}"
            )
        for name in scorers.keys() - weights.keys():
            raise ConfigError(f"scorers.{name} has no weight: add weights.{name}, such as 1.0")
        self.scorers = dict(scorers)
        self.weights = dict(weights)
        self.reads = tuple(sorted({column for scorer in scorers.values() for column in scorer.reads}))
        modalities = {m for scorer in scorers.values() for m in scorer.capabilities.modalities}
        differentiable = all(scorers[name].capabilities.differentiable for name, weight in weights.items() if weight)
        self.capabilities = Capabilities(modalities=tuple(sorted(modalities)), differentiable=differentiable)

    def score(self, request: RewardRequest) -> RewardResponse:
        total = torch.zeros(len(request), dtype=torch.float64)
        components = {}
        for name, scorer in self.scorers.items():
            answer = checked_score(scorer, request, name)
            total += self.weights[name] * answer.total.double()
            components[name] = answer.total
            if len(answer.components) > 1:
                components |= {f"{name}_{part}": scores for part, scores in answer.components.items()}
        return RewardResponse(total=total.float(), components=components)

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the total of `score` with its gradient. A scorer of weight 0, which only watches, needs none."""
        total = torch.zeros(len(images), device=images.device)
        for name, weight in self.weights.items():
            if weight:
                total = total + weight * objective_of(self.scorers[name], images, prompts)
        return total

    def offload(self) -> None:
        for scorer in self.scorers.values():
            scorer.offload()

    def onload(self) -> None:
        for scorer in self.scorers.values():
            scorer.onload()
