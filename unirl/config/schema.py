"""The signature is the schema: the keys that a class accepts, read from its constructor."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final


class _Required:
    """Marks a key without a default."""

    def __repr__(self) -> str:
        return "(required)"


REQUIRED: Final = _Required()

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Key:
    """One key that a recipe may write."""

    name: str
    annotation: Any
    default: Any = REQUIRED
    default_target: str | None = None
    """For a block: its `_target_` if the recipe names none."""


@dataclass(frozen=True)
class Schema:
    """The parameters of a constructor: keys from the recipe, and wired ones (before `*`) from the trainer."""

    target: Callable[..., Any]
    keys: Mapping[str, Key]
    wired: Mapping[str, bool]
    """Parameter name to True if it has no default."""

    @property
    def owner(self) -> type:
        """The class itself, also when the target is one of its classmethods."""
        return self.target if inspect.isclass(self.target) else self.target.__self__  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """The dotted name that `_target_` gives."""
        return dotted_name(self.target)

    @property
    def toy(self) -> Mapping[str, Any]:
        """Values that the class sets at scale=toy: its own mapping, or the nearest inherited one."""
        return next((vars(base)["toy"] for base in self.owner.__mro__ if "toy" in vars(base)), EMPTY)

    @property
    def is_value(self) -> bool:
        """True if the target is a config dataclass, which can be built while checking."""
        return is_config(self.target)


def dotted_name(target: Callable[..., Any]) -> str:
    """The name that `_target_` gives for a class, or for a classmethod of one."""
    return f"{target.__module__}.{target.__qualname__}"


def is_config(annotation: Any) -> bool:
    """True for a config dataclass: a dataclass whose parameters all come from the recipe."""
    is_dataclass = inspect.isclass(annotation) and dataclasses.is_dataclass(annotation)
    return is_dataclass and not schema_of(annotation).wired


@cache
def schema_of(target: Callable[..., Any]) -> Schema:
    """The schema of a class, or of a classmethod bound to its class."""
    if inspect.isclass(target) and dataclasses.is_dataclass(target):
        return _dataclass_schema(target)
    return _signature_schema(target)


def _dataclass_schema(cls: type) -> Schema:
    """All fields of a dataclass are keys, unless some are keyword-only: then the positional ones are wired."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    hints = _field_hints(cls, {field.name for field in fields})
    mixed = any(field.kw_only for field in fields)
    keys = {f.name: _field_key(f, hints[f.name]) for f in fields if f.kw_only or not mixed}
    wired = {f.name: _field_default(f) is REQUIRED for f in fields if f.name not in keys}
    return Schema(cls, keys, wired)


def _field_key(field: dataclasses.Field[Any], annotation: Any) -> Key:
    return Key(field.name, annotation, _field_default(field), field.metadata.get("target"))


def _field_default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _field_hints(cls: type, fields: set[str]) -> dict[str, Any]:
    """Annotations of the dataclass's fields, each evaluated in the module that defines it."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__])
        notes = inspect.get_annotations(base)
        hints |= {name: _evaluate(notes[name], names) for name in notes.keys() & fields}
    return hints


def _signature_schema(target: Callable[..., Any]) -> Schema:
    keys: dict[str, Key] = {}
    wired: dict[str, bool] = {}
    for parameter in inspect.signature(target).parameters.values():
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        if parameter.kind is parameter.KEYWORD_ONLY:
            keys[parameter.name] = Key(parameter.name, _evaluate(parameter.annotation, _names_at(target)), default)
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            wired[parameter.name] = default is REQUIRED
        else:
            raise TypeError(f"{target.__qualname__} takes *{parameter.name}: a recipe's class names every key")
    return Schema(target, keys, wired)


def _names_at(target: Callable[..., Any]) -> dict[str, Any]:
    """The global names of the module that defines the constructor."""
    function = target.__init__ if inspect.isclass(target) else target.__func__  # type: ignore[attr-defined]
    return function.__globals__ if inspect.isfunction(function) else {}


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    """An annotation as an object. It stays a string if its class is imported for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        return typing.get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), names, include_extras=True)[
            "it"
        ]
    except NameError:
        return annotation
