"""The prompts of a recipe, read and checked before a folder is made or a model loaded."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.config.build import build
from unirl.config.errors import DataError
from unirl.config.evaluation import EvaluationConfig
from unirl.config.load import Recipe
from unirl.config.node import nodes_below
from unirl.config.recipe import RecipeConfig
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.plan.machine import scores_elsewhere
from unirl.plan.preflight import known_facts
from unirl.reward.base import RewardScorer
from unirl.reward.scoring import unscorable
from unirl.types.protocols import DataSource


def load_data(recipe: Recipe) -> DataSource[Prompt]:
    """The prompts of a recipe. They are read first: a bad line is known before a folder is made or a model loaded.

    Raises:
        DataError: a file is bad, a prompt brings fewer or more images than the model takes, as far as that is known,
            or the reward cannot score samples of a prompt.
        DependencyError: a scorer that checks prompts needs a package that is not installed.
    """
    config = recipe.config
    source: DataSource[Prompt] = build(config.data_source, seed=config.seed, eval_data_path=config.evaluation.data_path)
    prompts = prompts_of(source, config.evaluation)
    facts = known_facts(config)
    if facts is not None:
        check_counts(prompts, facts)
    check_scorable(prompts, config)
    return source


def check_scorable(prompts: Iterable[Prompt], config: RecipeConfig) -> None:
    """Raises DataError (4002) if samples of a prompt could not be scored. Names the first one and counts the others.

    Scorers that accept every prompt are not built, and neither are those of a reward on several machines, which its
    own process asks when the run starts (`RewardService.check_prompts`).
    """
    if scores_elsewhere(config):
        return
    asked = [node for node in config.scorers if any(_checks_prompts(below.schema.owner) for below in nodes_below(node))]
    scorers: list[RewardScorer] = [build(node) for node in asked]
    problems = [
        f"{prompt.place}: {why}" for prompt in prompts for why in unscorable(scorers, prompt.text, prompt.metadata)
    ]
    if problems:
        others = f". {len(problems) - 1} more: unirl data check --recipe lists them" if len(problems) > 1 else ""
        raise DataError(problems[0] + others)


def _checks_prompts(cls: type) -> bool:
    """Returns True for a scorer with a check of its own for prompts."""
    return issubclass(cls, RewardScorer) and cls.check_prompt is not RewardScorer.check_prompt


def prompts_of(source: DataSource[Prompt], evaluation: EvaluationConfig) -> list[Prompt]:
    """Every prompt that a run may take, those of its evaluations included."""
    held_out = source.eval_prompts(evaluation.max_prompts) if evaluation.enabled else ()
    return [*source.prompts, *held_out]
