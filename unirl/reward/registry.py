"""The scorers of `unirl.reward.local` by name, for commands and services that name a reward without a recipe."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence

import unirl.reward.local
from unirl.config.build import SPECIAL, build, check_node
from unirl.config.errors import ConfigError, did_you_mean
from unirl.config.schema import schema_of
from unirl.config.targets import find_target
from unirl.reward.base import RewardScorer
from unirl.reward.contract import check_constructor

SUFFIX = "RewardScorer"


def scorers() -> dict[str, type[RewardScorer]]:
    """Returns the class of every local scorer by name: `pickscore`, `jpeg_compressibility`, ..."""
    named = {}
    for info in pkgutil.iter_modules(unirl.reward.local.__path__, f"{unirl.reward.local.__name__}."):
        for cls in vars(importlib.import_module(info.name)).values():
            is_scorer = inspect.isclass(cls) and issubclass(cls, RewardScorer) and not inspect.isabstract(cls)
            if is_scorer and cls.__module__ == info.name:
                named[_name(cls)] = cls
    return named


def _name(cls: type) -> str:
    """Returns the module's name if the class has the same name, otherwise the words of the class in snake case."""
    words = cls.__name__.removesuffix(SUFFIX)
    stem = cls.__module__.rpartition(".")[2]
    return stem if words.lower() == stem.replace("_", "") else re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()


def make_scorer(
    name: str, params: Mapping[str, object], *, toy: bool = False, plugins: Sequence[str] = ()
) -> RewardScorer:
    """Returns the local scorer `name`, or the class with that dotted name in one of the packages `plugins`.

    Args:
        params: fields of the scorer's spec, or keyword arguments of a scorer without a spec.
        toy: use the scorer's toy values for the settings that `params` does not name.

    Raises:
        ConfigError: there is no such scorer, or it does not accept `params`; the message lists what exists.
    """
    schema = schema_of(_find(name, plugins))
    check_constructor(schema.owner, schema.wired)
    spec = schema.keys["config"].annotation if list(schema.keys) == ["config"] else None
    values = dict(schema_of(spec or schema.target).toy if toy else {}) | dict(params)
    tree = {SPECIAL: schema.name} | ({"config": values} if spec else values)
    scorer: RewardScorer = build(check_node(tree, RewardScorer, name, tuple(plugins)))
    return scorer


def _find(name: str, plugins: Sequence[str]) -> Callable[..., object]:
    return find_target(name, "scorer", tuple(plugins)) if "." in name else scorer_class(name)


def scorer_class(name: str) -> type[RewardScorer]:
    """Returns the class of the local scorer `name`.

    Raises:
        ConfigError: there is no such scorer; the message lists what exists.
    """
    known = scorers()
    if name not in known:
        raise ConfigError(
            f"there is no scorer {name!r}.{did_you_mean(name, known)} There are {', '.join(sorted(known))}. To use a "
            "scorer of your own, write its dotted name and list its package in `plugins`"
        )
    return known[name]
