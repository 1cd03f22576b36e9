"""Several scorers as one: a weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, RewardError, did_you_mean
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import answer_of, check_prompt, check_start, objective_of
from unirl.types.protocols import Capabilities, Scorer
from unirl.types.reward import Answer, Failure, Failures, RewardRequest, RewardResponse


class WeightedRewards(RewardScorer):
    """total = sum over scorers of weight x that scorer's total. Components keep their scorer's name as a prefix.

    A scorer of weight 0 is logged only: its scores enter no advantage, and it may fail without harm. The answers
    of rows come from the first scorer that gives any; logged-only scorers come last.
    """

    capabilities = Capabilities()  # the class's; its objects have those of their scorers

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
        components: dict[str, Tensor] = {}
        logged: dict[str, Tensor] = {}
        failures: dict[int, Failures] = {}
        answers: Sequence[Answer | None] | None = None
        for name, weight in sorted(self.weights.items(), key=lambda item: not item[1]):
            answer = answer_of(self.scorers[name], request, name) if weight else self._logged_only_answer(name, request)
            total += weight * answer.total.double() if weight else 0.0
            (components if weight else logged).update(_named(name, answer))
            for row, found in answer.failures.items():
                failures[row] = failures.get(row, ()) + found
            answers = answer.answers if answers is None else answers
        return RewardResponse(
            total=total.float(),
            components=components,
            logged_rewards=logged,
            failures=failures,
            answers=answers,
        )

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Every scorer's own check; one of weight 0 may fail without harm."""
        for name, weight in self.weights.items():
            if weight:
                check_prompt(self.scorers[name], prompt, metadata)

    def check_start(self) -> None:
        """Every scorer's own check; one of weight 0 may fail without harm."""
        for name, weight in self.weights.items():
            if weight:
                check_start(self.scorers[name])

    def _logged_only_answer(self, name: str, request: RewardRequest) -> RewardResponse:
        """The answer of a logged-only scorer; NaN for all rows when it fails as a whole."""
        try:
            return answer_of(self.scorers[name], request, name)
        except RewardError as error:
            failure = (Failure(name, str(error), error.code),)
            nothing = torch.full((len(request),), torch.nan)
            return RewardResponse(
                total=nothing, components={name: nothing}, failures=dict.fromkeys(range(len(request)), failure)
            )

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the total of `score` with its gradient. A scorer of weight 0, which is logged only, needs none."""
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


def _named(name: str, answer: RewardResponse) -> dict[str, Tensor]:
    """The total of a scorer under its name, and its components, if there are several, behind it."""
    parts = answer.components if len(answer.components) > 1 else {}
    return {name: answer.total} | {f"{name}_{part}": scores for part, scores in parts.items()}
