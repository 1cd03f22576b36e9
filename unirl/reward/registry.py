"""The scorers of `unirl.reward.local` by name, for those who name a reward without a recipe."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import unirl.reward.local
from unirl.config.build import SPECIAL, build, check_node
from unirl.config.errors import ConfigError, did_you_mean
from unirl.config.schema import Schema, is_config, schema_of
from unirl.config.targets import find_target
from unirl.reward.base import RewardScorer
from unirl.types.protocols import Scorer

SUFFIX = "RewardScorer"


def scorers() -> dict[str, type[RewardScorer]]:
    """Name to class of every local scorer: `pickscore`, `jpeg_compressibility`, ..."""
    package = unirl.reward.local
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    return {_name(cls, module): cls for module in modules for cls in _classes(module)}


def _classes(module: ModuleType) -> list[type[RewardScorer]]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, RewardScorer) and value.__module__ == module.__name__
        if not inspect.isabstract(value)
    ]


def _name(cls: type, module: ModuleType) -> str:
    """The module's own name where the class is called like it, otherwise the class's words with underscores."""
    words = cls.__name__.removesuffix(SUFFIX)
    stem = module.__name__.rpartition(".")[2]
    return stem if words.lower() == stem.replace("_", "") else re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()


def make_scorer(name: str, params: Mapping[str, Any], *, toy: bool = False, plugins: Sequence[str] = ()) -> Scorer:
    """The scorer called `name`, or the class of that dotted name in one of `plugins`.

    Args:
        params: fields of the scorer's spec; keyword arguments of one without a spec.
        toy: take the scorer's own small values where `params` says nothing.

    Raises:
        ConfigError: no such scorer, or one that does not take `params`; the message says what there is.
    """
    schema = schema_of(_find(name, plugins))
    spec = _spec(schema)
    values = dict((spec or schema).toy if toy else {}) | dict(params)
    tree = {SPECIAL: schema.name} | ({"config": values} if spec else values)
    scorer: Scorer = build(check_node(tree, RewardScorer, name, tuple(plugins)))
    return scorer


def _find(name: str, plugins: Sequence[str]) -> Any:
    if "." in name:
        return find_target(name, "scorer", tuple(plugins))
    known = scorers()
    if name not in known:
        raise ConfigError(
            f"there is no scorer {name!r}.{did_you_mean(name, known)} There are {', '.join(sorted(known))}; "
            "your own is named with its package, which `plugins` allows"
        )
    return known[name]


def _spec(schema: Schema) -> Schema | None:
    """The schema of the scorer's spec, where `config` is all that it takes."""
    if list(schema.keys) != ["config"]:
        return None
    kind: Any = type(schema.keys["config"].default)
    return schema_of(kind) if is_config(kind) else schema_of(schema.keys["config"].annotation)
