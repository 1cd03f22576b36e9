"""Several scorers as one scorer: a weighted sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, InvalidValueError, RewardError, did_you_mean
from unirl.reward.base import RewardScorer
from unirl.reward.contract import COMPONENT, PLAIN_NAME, check_scorer
from unirl.reward.scoring import failed_response, objective_of, response_of
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, Failures, RewardRequest, RewardResponse


class WeightedRewards(RewardScorer):
    """total = sum over scorers of weight * total of that scorer. A component's name begins with its scorer's name.

    A scorer of weight 0 is a logged-only reward: its scores do not enter the advantages, and it may fail without
    consequences. The answers of a response are those of the first scorer that reports answers; logged-only rewards
    come last.
    """

    reads_levels = True
    capabilities = Capabilities()  # of the class; an object has the capabilities of its scorers

    def __init__(self, *, scorers: Mapping[str, RewardScorer], weights: Mapping[str, float]) -> None:
        """
        Args:
            scorers: the scorers by name.
            weights: one weight for each of these names.
        """
        for name in weights.keys() - scorers.keys():
            raise ConfigError(
                f"weights.{name} names no scorer.{did_you_mean(name, scorers)} There are {sorted(scorers)}"
            )
        for name in scorers:
            check_scorer(scorers[name])
            if not COMPONENT.fullmatch(name):
                raise ConfigError(f"scorers.{name}: the name becomes part of a metric: {PLAIN_NAME}")
        for name in scorers.keys() - weights.keys():
            raise ConfigError(f"scorers.{name} has no weight: add weights.{name}, such as 1.0")
        if not any(weights.values()):
            raise InvalidValueError(f"weights{without_reward(weights)}")
        self.scorers = dict(scorers)
        self.parts = tuple(scorers.values())
        self.weights = dict(weights)
        self.reads = tuple(sorted({column for scorer in scorers.values() for column in scorer.reads}))
        modalities = {m for scorer in scorers.values() for m in scorer.capabilities.modalities}
        differentiable = all(scorers[name].capabilities.differentiable for name, weight in weights.items() if weight)
        self.capabilities = Capabilities(modalities=tuple(sorted(modalities)), differentiable=differentiable)

    def score(self, request: RewardRequest) -> RewardResponse:
        total = torch.zeros(len(request), dtype=torch.float64)
        responses = {}
        for name, weight in sorted(self.weights.items(), key=lambda item: not item[1]):
            try:
                responses[name] = response_of(self.scorers[name], request, name)
            except RewardError as error:
                if weight:
                    raise
                responses[name] = failed_response(request, name, error)
            if weight:
                total += weight * responses[name].total.double()
        return combined(total.float(), responses, {name for name, weight in self.weights.items() if not weight})

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        """Runs the check of every scorer except the logged-only ones, which may fail."""
        for name, weight in self.weights.items():
            if weight:
                self.scorers[name].check_prompt(prompt, metadata)

    def check_start(self) -> None:
        for name, weight in self.weights.items():
            if weight:
                self.scorers[name].check_start()

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the differentiable total [B] of `score`. A logged-only scorer needs no gradient."""
        total = torch.zeros(len(images), device=images.device)
        for name, weight in self.weights.items():
            if weight:
                total = total + weight * objective_of(self.scorers[name], images, prompts)
        return total


def without_reward(weights: Mapping[str, float]) -> str:
    """The end of a message about weights that are all 0, after their name."""
    return f"={dict(weights)}: every reward would be 0, and nothing learned. Give one a weight, such as 1.0"


def combined(total: Tensor, responses: Mapping[str, RewardResponse], logged: Collection[str]) -> RewardResponse:
    """Returns the response of several rewards by name. Those in `logged` are logged only.

    The total of a reward is named after it and, if it has several components, these are named `<reward>_<component>`.
    """
    columns: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
    failures: dict[int, Failures] = {}
    answers: Sequence[Answer | None] | None = None
    for name in sorted(responses, key=lambda name: name in logged):
        response = responses[name]
        parts = response.components if len(response.components) > 1 else {}
        columns[name in logged] |= {name: response.total} | {f"{name}_{part}": column for part, column in parts.items()}
        columns[True] |= {f"{name}_{part}": column for part, column in response.logged_rewards.items()}
        for row, row_failures in response.failures.items():
            failures[row] = failures.get(row, ()) + row_failures
        answers = response.answers if answers is None else answers
    return RewardResponse(
        total=total, components=columns[False], logged_rewards=columns[True], failures=failures, answers=answers
    )
