"""Checks of a recipe by its pipeline and environment, before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from unirl.config.build import build
from unirl.config.errors import DependencyError
from unirl.config.recipe import RecipeConfig
from unirl.types.facts import ModelFacts
from unirl.types.sampling import Sampling


@runtime_checkable
class DescribedBundle(Protocol):
    """A bundle class that can describe its model from its settings, without building it."""

    def facts_from(self, settings: Mapping[str, object]) -> ModelFacts:
        """The facts of the model. A method of the class.

        Args:
            settings: the block `bundle`, with its defaults.
        """
        ...


@runtime_checkable
class RestrictedPipeline(Protocol):
    """A pipeline class that can refuse a model or sampling settings without being built."""

    def check_recipe(
        self, facts: ModelFacts, sampling: Sampling, evaluation: Sampling | None, settings: Mapping[str, object]
    ) -> Sequence[str]:
        """The notices about the recipe. A method of the class.

        Args:
            evaluation: the sampling settings of evaluations. None if there are none.
            settings: the block `pipeline`, with its defaults.

        Raises:
            ConfigError: the parts do not fit. The message names the key.
            DependencyError: 3001, a library that it needs to tell is not installed here.
        """
        ...

    def check_installed(self, settings: Mapping[str, object]) -> None:
        """Raises DependencyError (3001) if a library that the pipeline needs is not installed. A method of the class.

        Args:
            settings: the block `pipeline`, with its defaults.
        """
        ...


def pipeline_notices(config: RecipeConfig, facts: ModelFacts | None) -> Sequence[str]:
    """Checks the pipeline against the model. A missing library is no reason to refuse: the run may be elsewhere."""
    pipeline = config.pipeline.schema.owner
    if facts is None or not isinstance(pipeline, RestrictedPipeline):
        return ()
    sampling: Sampling = build(config.sampling)
    changes = config.evaluation.settings(sampling.evaluation_keys)
    evaluation = sampling.for_evaluation(changes) if config.evaluation.enabled else None
    with suppress(DependencyError):
        return pipeline.check_recipe(facts, sampling, evaluation, config.pipeline.values)
    return ()
