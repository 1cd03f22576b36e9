"""The model behind a fake server. Its classes are those of a recipe, or those that the engine names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from unirl.config.compose import compose
from unirl.config.errors import NotFoundError
from unirl.config.merge import get
from unirl.config.targets import find_target
from unirl.models.base import Pipeline
from unirl.types.protocols import DtypeName

RECIPES: Mapping[str, str] = {
    "sglang_llm": "llm/quickstart",
    "openai": "llm/quickstart",
    "sglang": "diffusion/sd3_trainside",
    "vllm_omni": "diffusion/sd3_trainside",
}
"""Engine to the recipe whose model a fake server has if its command line names none."""


@dataclass(frozen=True)
class ServedModel:
    """The classes and the weights of a model."""

    bundle: str
    """The dotted name of the bundle's class."""
    pipeline: str
    """The dotted name of the pipeline's class."""
    path: str = "toy"
    """`toy`, another model that ships with the bundle, or a directory."""
    dtype: DtypeName = "fp32"

    @classmethod
    def of_recipe(cls, recipe: str, path: str = "toy", dtype: DtypeName = "fp32") -> ServedModel:
        """The classes of a recipe of one policy."""
        tree = compose(recipe).tree
        return cls(str(get(tree, "bundle._target_")), str(get(tree, "pipeline._target_")), path, dtype)

    def load(self) -> Pipeline:
        """The pipeline. Raises ConfigError for unknown classes, NotFoundError for a directory without a model."""
        bundle = find_target(self.bundle, "--bundle")
        pipeline = find_target(self.pipeline, "--pipeline")
        try:
            loaded = bundle(path=self.path, dtype=self.dtype)
        except NotFoundError as error:  # it names the key of a recipe
            raise NotFoundError(str(error).replace("bundle.path=", "--path ")) from error
        return cast(Pipeline, pipeline(loaded))
