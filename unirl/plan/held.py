"""Models that nothing trains, and that lie on the devices of the rollout beside the policy as long as the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from unirl.config.node import nodes_below
from unirl.config.recipe import RecipeConfig
from unirl.models.loading.estimate import HeldModel


@runtime_checkable
class HoldsModel(Protocol):
    """A class of a recipe whose objects keep a model of their own, such as a video model as an environment."""

    def held(self, settings: Mapping[str, object]) -> HeldModel:
        """The size of this model with the settings of a recipe. It is not loaded if it is large."""
        ...


def held_models(config: RecipeConfig) -> list[HeldModel]:
    """The models beside the policy of a recipe, in its bundle and its environment."""
    nodes = nodes_below([config.bundle, config.pipeline])
    return [owner.held(node.values) for node in nodes if isinstance(owner := node.schema.owner, HoldsModel)]
