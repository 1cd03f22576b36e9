"""Which classes stand where in a recipe that was not checked yet."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from unirl.config.build import SPECIAL
from unirl.config.errors import ConfigError
from unirl.config.layers import Tree, join
from unirl.config.recipe import RecipeConfig
from unirl.config.schema import Key, Schema, is_config, schema_of
from unirl.config.targets import find_target


def schemas_of(tree: Tree, plugins: tuple[str, ...] = ()) -> dict[str, Schema]:
    """Key path to schema of every node of a recipe, written or default; "" is the recipe itself."""
    return dict(_schemas(tree, schema_of(RecipeConfig), "", plugins))


def _schemas(tree: Any, schema: Schema, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """Key path to schema of every node, written or default; what cannot be read is left to the check."""
    yield path, schema
    for key in schema.keys.values():
        value = tree.get(key.name, {} if key.default_target or is_config(type(key.default)) else None)
        place = join(path, key.name)
        below = _schema_at(key, value, place, plugins)
        if below is not None:
            yield from _schemas(value, below, place, plugins)
        elif isinstance(value, dict):
            yield from _by_name(value, place, plugins)


def _by_name(nodes: Tree, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """The nodes of a mapping, such as the scorers of a weighted sum."""
    for name, value in nodes.items():
        if isinstance(value, dict) and SPECIAL in value:
            below = _schema_at(Key(name, Any), value, join(path, name), plugins)
            if below is not None:
                yield from _schemas(value, below, join(path, name), plugins)


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
