"""The sizes of the model of a recipe, which is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol, runtime_checkable

from unirl.config.recipe import RecipeConfig
from unirl.models.loading.estimate import ModelEstimate

# A search over recipes plans one model many times, and building it without storage takes seconds.
KEPT_ESTIMATES = 8


@runtime_checkable
class Estimated(Protocol):
    """A bundle class that can say the sizes of a model without loading it."""

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """The sizes of a model."""
        ...


@runtime_checkable
class EstimatedBySettings(Protocol):
    """A bundle class whose model is not known by its path alone, such as a toy of several versions."""

    def estimate_from(self, settings: Mapping[str, object]) -> ModelEstimate:
        """The sizes of the model that the settings of a bundle name."""
        ...


def estimate_of(config: RecipeConfig) -> ModelEstimate:
    """The sizes of the recipe's model, whose bundle class is `Estimated`."""
    owner, path = config.bundle.schema.owner, config.model_path
    assert isinstance(owner, Estimated) and path is not None
    if isinstance(owner, EstimatedBySettings):
        return _estimate_from(owner, FrozenSettings(config.bundle.values))
    return _estimate(owner, path, config.model_revision)


class FrozenSettings:
    """Settings of a bundle as a key of a cache."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = dict(values)
        self.text = repr(sorted(self.values.items()))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenSettings) and other.text == self.text


@lru_cache(maxsize=KEPT_ESTIMATES)
def _estimate(owner: Estimated, path: str, revision: str | None) -> ModelEstimate:
    return owner.estimate(path, revision)


@lru_cache(maxsize=KEPT_ESTIMATES)
def _estimate_from(owner: EstimatedBySettings, settings: FrozenSettings) -> ModelEstimate:
    return owner.estimate_from(settings.values)
