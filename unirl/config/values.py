"""Scalars, sequences and mappings of a recipe, read as the annotation of their parameter demands.

msgspec judges scalars, choices and the ranges of `Annotated[int, Meta(ge=1)]`. This module adds the key path, the nodes
inside containers, and messages that say what to write.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from unirl.config.errors import BlockValueError, ConfigError, InvalidValueError, did_you_mean


@dataclass(frozen=True)
class ReadContext:
    """The key path of a value, and how to read nodes below it."""

    path: str
    where: Callable[[str], str]
    """Key path to `" (sd3_trainside.yaml:12)"` or ""."""
    plugins: tuple[str, ...]
    read_node: Callable[[Any, Any, ReadContext], Any]
    """(value, class or None, context) -> Node."""

    def below(self, key: object) -> ReadContext:
        """The context of a key, or of an item, of this value."""
        return ReadContext(f"{self.path}.{key}" if self.path else str(key), self.where, self.plugins, self.read_node)

    def error(self, message: str, kind: type[ConfigError] = ConfigError, way_out: str = "") -> ConfigError:
        """An error that says where the value was written, and then the way out."""
        return kind(f"{message}{self.where(self.path)}.{way_out}".removesuffix("."))


def read(value: Any, annotation: Any, context: ReadContext) -> Any:
    """`value`, converted and checked for a parameter with this annotation.

    Raises:
        ConfigError: 2004 for a wrong type, choice or range, 2005 for a scalar in place of a block, and those of nodes.
    """
    plain, ranges = _unwrap(annotation)
    origin = get_origin(plain)
    reader = _READERS.get(origin or plain)
    if reader is None:
        return context.read_node(value, origin or plain, context)
    result = reader(value, plain, context)
    for limits in ranges:
        _check_range(result, value, plain, limits, context)
    return result


def _check_range(number: Any, written: Any, kind: Any, limits: msgspec.Meta, context: ReadContext) -> None:
    try:
        msgspec.convert(number, Annotated[kind, limits])
    except msgspec.ValidationError as error:
        bounds = {">=": limits.ge, ">": limits.gt, "<=": limits.le, "<": limits.lt}
        rule = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        raise context.error(f"{context.path} must be {rule}, got {show(written)}", InvalidValueError) from error


def spell(annotation: Any) -> str:
    """An annotation as a message or a listing shows it."""
    annotation, _ = _unwrap(annotation)
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


def _unwrap(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    """The type behind Annotated and NewType, and the ranges that Annotated adds."""
    ranges: list[msgspec.Meta] = []
    while True:
        if get_origin(annotation) is typing.Annotated:
            annotation, *metadata = get_args(annotation)
            ranges += [item for item in metadata if isinstance(item, msgspec.Meta)]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation, ranges


def _wrong(value: Any, wanted: str, context: ReadContext, way_out: str = "") -> ConfigError:
    return context.error(
        f"{context.path} must be {wanted}, got {show(value)} ({_kind(value)})", InvalidValueError, way_out
    )


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "an integer", float: "a number", dict: "a mapping", list: "a list"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


def _read_scalar(value: Any, kind: Any, context: ReadContext) -> Any:
    try:
        result = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong(value, _SCALARS[kind], context, _scalar_hint(value, kind, context)) from error
    if isinstance(result, float) and math.isnan(result):
        raise _wrong(value, "a number, not nan", context)
    return result


def _scalar_hint(value: Any, kind: Any, context: ReadContext) -> str:
    if kind is str and isinstance(value, (int, float)):
        return f" Quote it: {context.path}='{value}'"
    return _number_hint(value, kind, context) if kind in (int, float) else ""


def _number_hint(value: Any, kind: type, context: ReadContext) -> str:
    """The way out for text that spells a number, and for a float that is whole."""
    try:
        number = kind(float(value))
    except (TypeError, ValueError, OverflowError):
        return ""
    how = "without quotes" if isinstance(value, str) else "as"
    return f" Write it {how}: {context.path}={number}"


def _read_path(value: Any, annotation: Any, context: ReadContext) -> Path:
    return Path(_read_scalar(value, str, context)).expanduser()


def _read_anything(value: Any, annotation: Any, context: ReadContext) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        raise context.error(
            f"{context.path} is plain data, from which no object is built, so it has no _target_", way_out=" Remove it"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _read_anything(item, annotation, context.below(key))
    return value


def _read_literal(value: Any, annotation: Any, context: ReadContext) -> Any:
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        choices = [str(choice) for choice in get_args(annotation)]
        hint = did_you_mean(str(value), choices)
        raise _wrong(value, f"one of {', '.join(choices)}", context, hint) from error


def _read_union(value: Any, annotation: Any, context: ReadContext) -> Any:
    if value is None and type(None) in get_args(annotation):
        return None
    members = [member for member in get_args(annotation) if member is not type(None)]
    problems = []
    for member in members:
        try:
            return read(value, member, context)
        except ConfigError as error:
            problems.append(error)
    if len(members) == 1:
        raise problems[0]
    raise _best_problem(value, annotation, problems, context)


def _best_problem(value: Any, annotation: Any, problems: list[ConfigError], context: ReadContext) -> ConfigError:
    """The error of a union: for a block, that of the first class that could be meant; otherwise the members' names."""
    about_keys = [problem for problem in problems if not isinstance(problem, (BlockValueError, InvalidValueError))]
    if isinstance(value, dict):
        return (about_keys or problems)[0]
    return _wrong(value, spell(annotation), context)


def _read_tuple(value: Any, annotation: Any, context: ReadContext) -> tuple[Any, ...]:
    kinds = get_args(annotation)
    if kinds and Ellipsis not in kinds:
        return _read_fixed(value, annotation, kinds, context)
    return tuple(_read_list(value, annotation, context))


def _read_fixed(value: Any, annotation: Any, kinds: tuple[Any, ...], context: ReadContext) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
        raise _wrong(value, f"a {spell(annotation)}", context)
    return tuple(read(item, kind, context.below(i)) for i, (item, kind) in enumerate(zip(value, kinds, strict=True)))


def _read_list(value: Any, annotation: Any, context: ReadContext) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        hint = f" Write a list: {context.path}=[{value}]" if isinstance(value, (str, int, float)) else ""
        raise _wrong(value, f"a {spell(annotation)}" if get_args(annotation) else "a list", context, hint)
    kind = (*get_args(annotation), Any)[0]
    return [read(item, kind, context.below(index)) for index, item in enumerate(value)]


def _read_frozenset(value: Any, annotation: Any, context: ReadContext) -> frozenset[Any]:
    return frozenset(_read_list(value, annotation, context))


def _read_mapping(value: Any, annotation: Any, context: ReadContext) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, f"a {spell(annotation)}" if get_args(annotation) else "a mapping", context)
    if "_target_" in value:
        return typing.cast("dict[Any, Any]", _read_anything(value, annotation, context))
    key_kind, kind = get_args(annotation) or (Any, Any)
    return {read(key, key_kind, context): read(item, kind, context.below(key)) for key, item in value.items()}


_READERS: dict[Any, Callable[[Any, Any, ReadContext], Any]] = {
    bool: _read_scalar,
    int: _read_scalar,
    float: _read_scalar,
    str: _read_scalar,
    type(None): _read_scalar,
    Path: _read_path,
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
