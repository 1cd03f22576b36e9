"""Checks the credit of a recipe of several tracks: a reward reaches every track, and the rule of credit fits."""

from __future__ import annotations

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.advantages import SIBLING_BASELINE, GroupAdvantage
from unirl.config.build import build
from unirl.config.errors import IncompatibleError
from unirl.config.load import Recipe
from unirl.types.credit import CREDIT_RULES


def check_credit(recipe: Recipe, scored: str) -> None:
    """Checks the tracks and the rule of credit of a recipe of several policies.

    Args:
        scored: the track whose samples the reward scores.

    Raises:
        IncompatibleError: 2020.
    """
    if len(recipe.policies) == 1:
        return
    _check_reached(recipe, scored)
    rule = CREDIT_RULES[recipe.credit]
    if rule.best_only:
        _check_losses_of_best(recipe)
    if rule.leave_one_out:
        _check_estimator(recipe)


def _check_reached(recipe: Recipe, scored: str) -> None:
    """Each track continues the one before it, so the rewards of the last one reach all of them."""
    trainer, last = recipe.config.trainer.class_name, list(recipe.policies)[-1]
    if scored != last:
        raise IncompatibleError(
            f"trainer: {trainer} scores the track '{scored}', and the last track of this recipe is '{last}', which no "
            "reward would reach. Leave the trainer block out, or set `track` of the class to the last track"
        )


def _check_losses_of_best(recipe: Recipe) -> None:
    for name in recipe.parents:
        algorithm: StageAlgorithm[object] = build(recipe.policies[name].algorithm)
        if algorithm.needs.pairs:
            raise IncompatibleError(
                f"credit={recipe.credit} trains one sample of each group of track '{name}', and {name}.algorithm "
                f"({recipe.policies[name].algorithm.class_name}) trains pairs of a better and a worse one. Write "
                "credit=max, which gives a rewrite the same reward"
            )


def _check_estimator(recipe: Recipe) -> None:
    advantage = recipe.config.advantage
    if not issubclass(advantage.schema.owner, GroupAdvantage):
        raise IncompatibleError(
            f"credit={recipe.credit} compares every sample with its siblings, and {advantage.class_name} has another "
            "baseline. Write ~advantage, or credit=mean"
        )
    for key, value in SIBLING_BASELINE.items():
        written = advantage.values[key]
        if key in advantage.written and written != value:
            raise IncompatibleError(
                f"credit={recipe.credit} takes a reward minus the mean of its siblings', without a divisor or a bound, "
                f"so advantage.{key}={written} would have no effect. Write ~advantage.{key}, or credit=mean"
            )
