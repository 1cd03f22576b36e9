"""scale=toy: any recipe, small enough for a CPU in seconds. One layer between the recipe and the command line.

The quantities of the loop get small values here; a class says its own in `toy: ClassVar[Mapping]`.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from unirl.config.build import SPECIAL
from unirl.config.errors import ConfigError
from unirl.config.layers import Layer, Tree, fold, get, join, put
from unirl.config.recipe import RecipeConfig
from unirl.config.schema import Key, Schema, is_config, schema_of
from unirl.config.targets import find_target

SOURCE = "scale=toy"

QUANTITIES: Mapping[str, Any] = {
    "num_devices": 1,
    "num_rollouts": 3,
    "stack.micro_batch_size": 8,
    "evaluation.max_prompts": 4,
    "evaluation.samples_per_prompt": 1,
    "evaluation.num_inference_steps": None,
    "backend.lora_cfg.rank": 4,
}

NUM_PROMPTS = 2
"""Prompts per step, at least: as many more as the updates of the recipe need to divide the samples."""


def toy_layer(tree: Tree, plugins: tuple[str, ...] = ()) -> Layer:
    """The small values for a composed recipe (interpolations resolved)."""
    schemas = dict(_schemas(tree, schema_of(RecipeConfig), "", plugins))
    toy: Tree = {}
    for path, schema in schemas.items():
        for name, value in schema.toy.items():
            put(toy, join(path, name), value)
    for path, value in QUANTITIES.items():
        parent, _, name = path.rpartition(".")
        if parent in schemas and name in schemas[parent].keys:
            put(toy, path, value)
    put(toy, "batch_size", _num_prompts(fold((Layer("", tree), Layer("", toy)))))
    return Layer(SOURCE, toy)


def _schemas(tree: Any, schema: Schema, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """Key path to schema of every node, written or default; what cannot be read is left to the check."""
    yield path, schema
    for key in schema.keys.values():
        value = tree.get(key.name, {} if key.default_target or is_config(type(key.default)) else None)
        below = _schema_at(key, value, join(path, key.name), plugins)
        if below is not None:
            yield from _schemas(value, below, join(path, key.name), plugins)


def _schema_at(key: Key, value: Any, path: str, plugins: tuple[str, ...]) -> Schema | None:
    if not isinstance(value, dict):
        return None
    target = value.get(SPECIAL, key.default_target)
    if target is not None:
        try:
            return schema_of(find_target(target, path, plugins))
        except ConfigError:
            return None
    kinds = [kind for kind in (key.annotation, *typing.get_args(key.annotation), type(key.default)) if is_config(kind)]
    return schema_of(kinds[0]) if kinds else None


def _num_prompts(tree: Tree) -> int:
    """The smallest P >= NUM_PROMPTS for which the recipe's updates divide the P x N samples."""
    group = get(tree, "sampling.samples_per_prompt", 1)
    updates = get(tree, "stack.num_updates_per_batch", 1)
    if not all(type(count) is int and count > 0 for count in (group, updates)):
        return NUM_PROMPTS
    multiple = updates // math.gcd(updates, group)
    return max(1, math.ceil(NUM_PROMPTS / multiple)) * multiple
