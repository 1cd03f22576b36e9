"""Several scorers as one scorer: a weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, RewardError, did_you_mean
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import check_prompt, check_start, objective_of, response_of
from unirl.types.protocols import Capabilities, Scorer
from unirl.types.reward import Answer, Failure, Failures, RewardRequest, RewardResponse


class WeightedRewards(RewardScorer):
    """total = sum over scorers of weight * total of that scorer. A component's name begins with its scorer's name.

    A scorer of weight 0 is a logged-only reward: its scores do not enter the advantages, and it may fail without
    consequences. The answers of a response are those of the first scorer that reports answers; logged-only rewards
    come last.
    """

    capabilities = Capabilities()  # of the class; an object has the capabilities of its scorers

    def __init__(self, *, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        """
        Args:
            scorers: the scorers by name.
            weights: one weight for each of these names.
        """
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
        components: dict[str, Tensor] = {}
        logged_rewards: dict[str, Tensor] = {}
        failures: dict[int, Failures] = {}
        answers: Sequence[Answer | None] | None = None
        for name, weight in sorted(self.weights.items(), key=lambda item: not item[1]):
            response = response_of(self.scorers[name], request, name) if weight else self._logged_only(name, request)
            total += weight * response.total.double() if weight else 0.0
            (components if weight else logged_rewards).update(_prefixed(name, response))
            for row, row_failures in response.failures.items():
                failures[row] = failures.get(row, ()) + row_failures
            answers = response.answers if answers is None else answers
        return RewardResponse(
            total=total.float(),
            components=components,
            logged_rewards=logged_rewards,
            failures=failures,
            answers=answers,
        )

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Runs the check of every scorer except the logged-only ones, which may fail."""
        for name, weight in self.weights.items():
            if weight:
                check_prompt(self.scorers[name], prompt, metadata)

    def check_start(self) -> None:
        """Runs the check of every scorer except the logged-only ones, which may fail."""
        for name, weight in self.weights.items():
            if weight:
                check_start(self.scorers[name])

    def _logged_only(self, name: str, request: RewardRequest) -> RewardResponse:
        """Returns the response of a logged-only scorer. All its scores are NaN when it fails as a whole."""
        try:
            return response_of(self.scorers[name], request, name)
        except RewardError as error:
            failure = (Failure(name, str(error), error.code),)
            no_scores = torch.full((len(request),), torch.nan)
            return RewardResponse(
                total=no_scores, components={name: no_scores}, failures=dict.fromkeys(range(len(request)), failure)
            )

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the differentiable total [B] of `score`. A logged-only scorer needs no gradient."""
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


def _prefixed(name: str, response: RewardResponse) -> dict[str, Tensor]:
    """Returns a scorer's total under its name and, where it has several components, those as `<name>_<component>`."""
    parts = response.components if len(response.components) > 1 else {}
    return {name: response.total} | {f"{name}_{part}": scores for part, scores in parts.items()}
