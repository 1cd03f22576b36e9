"""The scorers of `unirl.reward.local` by name, for commands and services that name a reward without a recipe."""

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
    """Returns the class of every local scorer by name: `pickscore`, `jpeg_compressibility`, ..."""
    package = unirl.reward.local
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
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
    """Returns the module's name if the class has the same name, otherwise the words of the class in snake case."""
    words = cls.__name__.removesuffix(SUFFIX)
    stem = module.__name__.rpartition(".")[2]
    return stem if words.lower() == stem.replace("_", "") else re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()


def make_scorer(name: str, params: Mapping[str, Any], *, toy: bool = False, plugins: Sequence[str] = ()) -> Scorer:
    """Returns the local scorer `name`, or the class with that dotted name in one of the packages `plugins`.

    Args:
        params: fields of the scorer's spec, or keyword arguments of a scorer without a spec.
        toy: use the scorer's toy values for the settings that `params` does not name.

    Raises:
        ConfigError: there is no such scorer, or it does not accept `params`; the message lists what exists.
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
            f"there is no scorer {name!r}.{did_you_mean(name, known)} There are {', '.join(sorted(known))}. To use a "
            "scorer of your own, write its dotted name and list its package in `plugins`"
        )
    return known[name]


def _spec(schema: Schema) -> Schema | None:
    """Returns the schema of the scorer's spec if `config` is its only argument."""
    if list(schema.keys) != ["config"]:
        return None
    kind: Any = type(schema.keys["config"].default)
    return schema_of(kind) if is_config(kind) else schema_of(schema.keys["config"].annotation)
