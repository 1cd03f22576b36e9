"""The prompts of a recipe, read and checked before a folder is made or a model loaded."""

from __future__ import annotations

from unirl.config.build import build
from unirl.config.load import Recipe
from unirl.config.recipe import EvaluationConfig
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.plan.preflight import known_facts
from unirl.types.protocols import DataSource


def load_data(recipe: Recipe) -> DataSource[Prompt]:
    """The prompts of a recipe. They are read first: a bad line is known before a folder is made or a model loaded.

    Raises:
        DataError: a file is bad, or a prompt brings fewer or more images than the model takes, as far as that is known.
    """
    config = recipe.config
    source: DataSource[Prompt] = build(config.data_source, seed=config.seed, eval_data_path=config.evaluation.data_path)
    facts = known_facts(config)
    if facts is not None:
        check_counts(prompts_of(source, config.evaluation), facts)
    return source


def prompts_of(source: DataSource[Prompt], evaluation: EvaluationConfig) -> list[Prompt]:
    """Every prompt that a run may take, those of its evaluations included."""
    held_out = source.eval_prompts(evaluation.max_prompts) if evaluation.enabled else ()
    return [*source.prompts, *held_out]
