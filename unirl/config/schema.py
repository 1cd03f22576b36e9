"""The signature is the schema: the keys that a class accepts, read from its constructor."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, TypeGuard

from unirl.config.errors import PluginError
from unirl.config.plugins import definition

REQUIRED: Final = dataclasses.MISSING
"""The default of a key that has none."""
DECORATOR = "@dataclass(frozen=True, kw_only=True)"


@dataclass(frozen=True)
class Key:
    """One key that a recipe may write."""

    name: str
    annotation: object
    default: object  # REQUIRED if there is none
    default_target: str | None = None
    """For a block: its `_target_` if the recipe names none."""


@dataclass(frozen=True)
class Schema:
    """The parameters of a constructor: keys from the recipe, and wired ones (before `*`) from the trainer."""

    target: Callable[..., object]
    keys: Mapping[str, Key]
    wired: Mapping[str, bool]
    """Parameter name to True if it has no default."""

    def __reduce__(self) -> tuple[Callable[..., Schema], tuple[Callable[..., object]]]:
        """Travels to workers as the name of its class: the ranges in annotations (msgspec.Meta) cannot be pickled."""
        return schema_of, (self.target,)

    @property
    def owner(self) -> type:
        """The class itself, also when the target is one of its classmethods."""
        return self.target if inspect.isclass(self.target) else self.target.__self__  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """The dotted name that `_target_` gives."""
        return dotted_name(self.target)

    @property
    def toy(self) -> Mapping[str, object]:
        """Values that the class sets at scale=toy: its own mapping, or the nearest inherited one."""
        return next((vars(base)["toy"] for base in self.owner.__mro__ if "toy" in vars(base)), {})

    @property
    def is_value(self) -> bool:
        """True if the target is a config dataclass, which can be built while checking."""
        return is_config(self.target)


def dotted_name(target: Callable[..., object]) -> str:
    """The name that `_target_` gives for a class, or for a classmethod of one."""
    return f"{target.__module__}.{target.__qualname__}"


def is_config(annotation: object) -> TypeGuard[type]:
    """True for a config dataclass: a dataclass whose parameters all come from the recipe."""
    return inspect.isclass(annotation) and dataclasses.is_dataclass(annotation) and not schema_of(annotation).wired


@cache
def schema_of(target: Callable[..., object]) -> Schema:
    """The schema of a class, or of a classmethod bound to its class."""
    if inspect.isclass(target) and dataclasses.is_dataclass(target):
        return _dataclass_schema(target)
    return _signature_schema(target)


def _dataclass_schema(cls: type) -> Schema:
    """All fields of a dataclass are keys, unless some are keyword-only: then the positional ones are wired."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    _check_fields(cls, fields)
    mixed = any(field.kw_only for field in fields)
    keys: dict[str, Key] = {}
    wired: dict[str, bool] = {}
    for field in fields:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.kw_only or not mixed:
            owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
            annotation = _evaluate(field.type, vars(sys.modules[owner.__module__]))
            keys[field.name] = Key(field.name, annotation, default, field.metadata.get("target"))
        else:
            wired[field.name] = default is REQUIRED
    return Schema(cls, keys, wired)


def _check_fields(cls: type, fields: Sequence[dataclasses.Field[Any]]) -> None:
    """Refuses a subclass of a dataclass whose own settings would be no keys. Raises PluginError (2031)."""
    annotations = inspect.get_annotations(cls)
    own = [name for name, annotation in annotations.items() if "ClassVar" not in str(annotation)]
    if "__dataclass_params__" not in vars(cls):
        if own:
            raise PluginError(
                f"{definition(cls)}: its base is a dataclass and it is none, so {', '.join(own)} would be no key. "
                f"Write {DECORATOR} above the class"
            )
        if "__init__" in vars(cls):
            raise PluginError(
                f"{definition(cls)}: it has an __init__, and the keys of a subclass of a dataclass are its fields. "
                f"Write fields and {DECORATOR} above the class; checks go into __post_init__"
            )
    inherited = [field for field in fields if field.name not in annotations]
    positional = [field.name for field in fields if field.name in annotations and not field.kw_only]
    if positional and inherited and all(field.kw_only for field in inherited):
        raise PluginError(
            f"{definition(cls)}: {', '.join(positional)} would be no key, since the fields of its base are "
            f"keyword-only. Write {DECORATOR} above the class"
        )


def _signature_schema(target: Callable[..., object]) -> Schema:
    keys: dict[str, Key] = {}
    wired: dict[str, bool] = {}
    owner: type = target if inspect.isclass(target) else target.__self__  # type: ignore[attr-defined]
    function = target.__init__ if inspect.isclass(target) else target.__func__  # type: ignore[attr-defined]
    names = function.__globals__ if inspect.isfunction(function) else {}
    for parameter in inspect.signature(target).parameters.values():
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        if parameter.kind is parameter.KEYWORD_ONLY:
            keys[parameter.name] = Key(parameter.name, _evaluate(parameter.annotation, names), default)
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            wired[parameter.name] = default is REQUIRED
        else:
            shown = str(parameter).partition(":")[0]
            raise PluginError(
                f"{definition(owner)}: its constructor takes {shown}, and a recipe can only set keys that are named. "
                "Write each key as a keyword-only parameter, after a lone *"
            )
    return Schema(target, keys, wired)


def _evaluate(annotation: object, names: dict[str, object]) -> object:
    """An annotation as an object. It stays a string if its class is imported for type checkers only.

    Args:
        names: global names of the module that defines the field or the constructor.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    try:
        holder = SimpleNamespace(__annotations__={"it": annotation})
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except NameError:
        return annotation
