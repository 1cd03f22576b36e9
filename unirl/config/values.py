"""Scalars, sequences and mappings of a recipe, read as the annotation that will receive them says."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from unirl.config.errors import BlockValueError, ConfigError, InvalidValueError, did_you_mean


@dataclass(frozen=True)
class Place:
    """Where a value stands, and how nodes below it are read."""

    path: str
    where: Callable[[str], str]
    """Key path to `" (sd3_trainside.yaml:12)"` or ""."""
    plugins: tuple[str, ...]
    read_node: Callable[[Any, Any, Place], Any]
    """(value, class or None, place) -> Node."""

    def below(self, key: object) -> Place:
        """The place of a key, or of an item, of this value."""
        return Place(f"{self.path}.{key}" if self.path else str(key), self.where, self.plugins, self.read_node)

    def error(self, message: str, kind: type[ConfigError] = ConfigError, way_out: str = "") -> ConfigError:
        """An error that says where the value was written, and then the way out."""
        return kind(f"{message}{self.where(self.path)}.{way_out}".removesuffix("."))


def read(value: Any, annotation: Any, place: Place) -> Any:
    """`value` as `annotation` wants it.

    Raises:
        ConfigError: 2004 for a wrong type or choice, 2005 for a scalar in place of a block, and those of nodes.
    """
    annotation = _unwrap(annotation)
    origin = get_origin(annotation)
    reader = _READERS.get(origin or annotation)
    if reader is not None:
        return reader(value, annotation, place)
    return place.read_node(value, origin or annotation, place)


def spell(annotation: Any) -> str:
    """An annotation as a message or a listing shows it."""
    annotation = _unwrap(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " | ".join(spell(member) for member in args)
    if origin in (tuple, list, Sequence, frozenset):
        kinds = [spell(kind) for kind in args if kind is not Ellipsis]
        return f"list of {kinds[0]}" if len(args) == 1 or Ellipsis in args else f"list [{', '.join(kinds)}]"
    if origin in (dict, Mapping):
        return f"mapping of {spell(args[0])} to {spell(args[1])}"
    return {type(None): "null", Any: "anything", object: "anything"}.get(annotation) or _name(annotation)


def show(value: Any) -> str:
    """A value as YAML would write it in one line, cut to a readable length."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _name(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _unwrap(annotation: Any) -> Any:
    """The type behind Annotated, a NewType, or a `type` alias."""
    while True:
        if get_origin(annotation) is typing.Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _wrong(value: Any, wanted: str, place: Place, way_out: str = "") -> ConfigError:
    return place.error(f"{place.path} must be {wanted}, got {show(value)} ({_kind(value)})", InvalidValueError, way_out)


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "an integer", float: "a number", dict: "a mapping", list: "a list"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _read_bool(value: Any, annotation: Any, place: Place) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "true or false", place)
    return value


def _read_int(value: Any, annotation: Any, place: Place) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, "an integer", place, _number_hint(value, int, place))
    return value


def _read_float(value: Any, annotation: Any, place: Place) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(value, "a number", place, _number_hint(value, float, place))
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if math.isnan(number):
        raise _wrong(value, "a number, not nan", place)
    return number


def _number_hint(value: Any, kind: type, place: Place) -> str:
    """Text that spells a number, and a float that is whole, are one edit away."""
    try:
        number = kind(float(value))
    except (TypeError, ValueError, OverflowError):
        return ""
    how = "without quotes" if isinstance(value, str) else "as"
    return f" Write it {how}: {place.path}={number}"


def _read_str(value: Any, annotation: Any, place: Place) -> str:
    if not isinstance(value, str):
        hint = f" Quote it: {place.path}='{value}'" if isinstance(value, (int, float)) else ""
        raise _wrong(value, "text", place, hint)
    return value


def _read_path(value: Any, annotation: Any, place: Place) -> Path:
    return Path(_read_str(value, str, place)).expanduser()


def _read_none(value: Any, annotation: Any, place: Place) -> None:
    if value is not None:
        raise _wrong(value, "null", place)


def _read_anything(value: Any, annotation: Any, place: Place) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        raise place.error(
            f"{place.path} is plain data, of which nothing is made: it has no _target_", way_out=" Remove it"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _read_anything(item, annotation, place.below(key))
    return value


def _read_literal(value: Any, annotation: Any, place: Place) -> Any:
    choices = get_args(annotation)
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    words = ", ".join(show(choice).strip("'") for choice in choices)
    raise _wrong(value, f"one of {words}", place, did_you_mean(str(value), map(str, choices)))


def _read_union(value: Any, annotation: Any, place: Place) -> Any:
    if value is None and type(None) in get_args(annotation):
        return None
    members = [member for member in get_args(annotation) if member is not type(None)]
    problems = []
    for member in members:
        try:
            return read(value, member, place)
        except ConfigError as error:
            problems.append(error)
    if len(members) == 1:
        raise problems[0]
    raise _best_problem(value, annotation, problems, place)


def _best_problem(value: Any, annotation: Any, problems: list[ConfigError], place: Place) -> ConfigError:
    """For a block, what the first class that could be meant says; otherwise all members by name."""
    about_keys = [problem for problem in problems if not isinstance(problem, (BlockValueError, InvalidValueError))]
    if isinstance(value, dict):
        return (about_keys or problems)[0]
    return _wrong(value, spell(annotation), place)


def _read_tuple(value: Any, annotation: Any, place: Place) -> tuple[Any, ...]:
    kinds = get_args(annotation)
    if kinds and Ellipsis not in kinds:
        return _read_fixed(value, annotation, kinds, place)
    return tuple(_read_list(value, annotation, place))


def _read_fixed(value: Any, annotation: Any, kinds: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
        raise _wrong(value, f"a {spell(annotation)}", place)
    return tuple(read(item, kind, place.below(i)) for i, (item, kind) in enumerate(zip(value, kinds, strict=True)))


def _read_list(value: Any, annotation: Any, place: Place) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        hint = f" Write a list: {place.path}=[{value}]" if isinstance(value, (str, int, float)) else ""
        raise _wrong(value, f"a {spell(annotation)}" if get_args(annotation) else "a list", place, hint)
    kind = (*get_args(annotation), Any)[0]
    return [read(item, kind, place.below(index)) for index, item in enumerate(value)]


def _read_frozenset(value: Any, annotation: Any, place: Place) -> frozenset[Any]:
    return frozenset(_read_list(value, annotation, place))


def _read_mapping(value: Any, annotation: Any, place: Place) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, f"a {spell(annotation)}" if get_args(annotation) else "a mapping", place)
    if "_target_" in value:
        return typing.cast("dict[Any, Any]", _read_anything(value, annotation, place))
    key_kind, kind = get_args(annotation) or (Any, Any)
    return {read(key, key_kind, place): read(item, kind, place.below(key)) for key, item in value.items()}


_READERS: dict[Any, Callable[[Any, Any, Place], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    Path: _read_path,
    type(None): _read_none,
    Any: _read_anything,
    object: _read_anything,
    Literal: _read_literal,
    Union: _read_union,
    types.UnionType: _read_union,
    tuple: _read_tuple,
    list: _read_list,
    Sequence: _read_list,
    frozenset: _read_frozenset,
    dict: _read_mapping,
    Mapping: _read_mapping,
}
