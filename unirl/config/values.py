"""Reads scalars and containers of a recipe as the annotation of their parameter demands.

msgspec judges scalars, choices and the ranges of `Annotated[int, Meta(ge=1)]`. This module adds the key path, the nodes
inside containers, and messages that say what to write.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from unirl.config.errors import BlockValueError, ConfigError, InvalidValueError, did_you_mean
from unirl.config.merge import join
from unirl.types.secrets import SecretMark, conceal

SCALARS: Mapping[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}
SEQUENCES, MAPPINGS, ANYTHING = (tuple, list, Sequence), (dict, Mapping), (Any, object)


@dataclass(frozen=True)
class ReadContext:
    """The key path of a value, and how to read nodes below it."""

    path: str
    where: Callable[[str], str]
    """Key path to `" (sd3_trainside.yaml:12)"` or ""."""
    plugins: tuple[str, ...]
    read_node: Callable[[object, object, ReadContext], object]
    """(value, class or None, context) -> Node."""

    def below(self, key: object) -> ReadContext:
        """The context of a key, or of an item, of this value."""
        return ReadContext(join(self.path, key), self.where, self.plugins, self.read_node)

    def error(self, message: str, kind: type[ConfigError] = ConfigError, way_out: str = "") -> ConfigError:
        """An error that says where the value was written, and then the way out."""
        return kind(f"{message}{self.where(self.path)}" + (f".{way_out}" if way_out else ""))

    def wrong(self, value: object, wanted: str, way_out: str = "") -> ConfigError:
        """The error about a value of the wrong type."""
        message = f"{self.path} must be {wanted}, got {show(value)} ({_kind(value)})"
        return self.error(message, InvalidValueError, way_out)


def read(value: object, annotation: object, context: ReadContext) -> Any:
    """`value`, converted and checked for a parameter with this annotation.

    Raises:
        ConfigError: 2004 for a wrong type, choice or range, 2005 for a scalar in place of a block, and those of nodes.
    """
    kind = _without_ranges(annotation)
    origin = get_origin(kind) or kind
    if origin in SCALARS or origin is Literal:
        return _read_scalar(value, annotation, context)
    if origin in (Union, types.UnionType):
        return _read_union(value, annotation, context)
    if origin in SEQUENCES:
        return _read_sequence(value, annotation, context)
    if origin in MAPPINGS:
        return _read_mapping(value, annotation, context)
    if origin in ANYTHING:
        return _read_anything(value, context)
    return context.read_node(value, origin, context)


def spell(annotation: object, ranges: bool = False) -> str:
    """An annotation as a message or a listing shows it; with `ranges`, numbers with their bounds: `float (> 1)`."""
    kind = _without_ranges(annotation)
    origin, args = get_origin(kind), [spell(arg, ranges) for arg in get_args(kind) if arg is not Ellipsis]
    if origin is Literal:
        return " | ".join(map(str, get_args(kind)))
    if origin in (Union, types.UnionType):
        return " | ".join(args)
    if origin in SEQUENCES:
        is_uniform = len(get_args(kind)) == 1 or Ellipsis in get_args(kind)
        return f"list of {args[0]}" if is_uniform else f"list [{', '.join(args)}]"
    if origin in MAPPINGS:
        return f"mapping of {args[0]} to {args[1]}"
    if kind in ANYTHING:
        return "anything"
    name = kind.__name__ if inspect.isclass(kind) else str(kind)
    shown = {"NoneType": "null", "tuple": "list", "dict": "mapping"}.get(name, name)
    return shown + (_bounds(annotation) if ranges else "")


def show(value: object) -> str:
    """A value as YAML would write it in one line, cut to a readable length."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""The bounds of a number in msgspec.Meta, as the listing writes them."""


def _bounds(annotation: object) -> str:
    """The range of an annotated number: ` (> 1)`, ` (0 <= x < 1)`, or nothing."""
    found: dict[str, str] = {}
    for meta in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        if isinstance(meta, msgspec.Meta):
            limits = {"ge": meta.ge, "gt": meta.gt, "le": meta.le, "lt": meta.lt}
            found |= {name: f"{limit:g}" for name, limit in limits.items() if limit is not None}
    if len(found) < 2:
        return "".join(f" ({SIGNS[name]} {limit})" for name, limit in found.items())
    low, high = (next((found[name], name) for name in names if name in found) for names in (("ge", "gt"), ("le", "lt")))
    return f" ({low[0]} {'<=' if low[1] == 'ge' else '<'} x {SIGNS[high[1]]} {high[0]})"


def _without_ranges(annotation: object) -> object:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _kind(value: object) -> str:
    names = {str: "text", bool: "true/false", int: "an integer", float: "a number", dict: "a mapping", list: "a list"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _read_scalar(value: object, annotation: object, context: ReadContext) -> object:
    kind = _without_ranges(annotation)
    if any(isinstance(about, SecretMark) for about in get_args(annotation)):
        conceal(str(value))  # before an error may quote it
    wanted = SCALARS.get(kind) or f"one of {', '.join(map(str, get_args(kind)))}"
    try:
        result = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise context.wrong(value, wanted, _scalar_hint(value, kind, context.path)) from error
    if isinstance(result, float) and not math.isfinite(result):
        raise context.wrong(value, "a finite number")
    for about in get_args(annotation)[1:] if kind is not annotation else ():
        if isinstance(about, msgspec.Meta):
            _check_range(result, value, about, context)
    return result


def _check_range(number: object, written: object, limits: msgspec.Meta, context: ReadContext) -> None:
    try:
        msgspec.convert(number, Annotated[float, limits])
    except msgspec.ValidationError as error:
        bounds = {">=": limits.ge, ">": limits.gt, "<=": limits.le, "<": limits.lt}
        rule = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        raise context.error(f"{context.path} must be {rule}, got {show(written)}", InvalidValueError) from error


def _scalar_hint(value: object, kind: object, path: str) -> str:
    """The way out for a misspelled choice, a number in place of text or the reverse, and a float that is whole."""
    if get_origin(kind) is Literal:
        return did_you_mean(str(value), map(str, get_args(kind)))
    if kind is str:
        return f" Quote it: {path}='{value}'" if isinstance(value, (int, float)) else ""
    if kind not in (int, float) or not isinstance(value, (str, int, float)):
        return ""
    try:
        number = int(float(value)) if kind is int else float(value)
    except (ValueError, OverflowError):
        return ""
    if kind is int and number != float(value):
        return f" Choose a whole number, such as {path}={number} or {path}={number + 1}"
    return f" Write it {'without quotes' if isinstance(value, str) else 'as'}: {path}={number}"


def _read_anything(value: object, context: ReadContext) -> object:
    if isinstance(value, dict) and "_target_" in value:
        raise context.error(
            f"{context.path} is plain data, from which no object is built, so it has no _target_", way_out=" Remove it"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _read_anything(item, context.below(key))
    return value


def _read_union(value: object, annotation: object, context: ReadContext) -> object:
    """The value as the first member that accepts it. A block is reported by the first class that could be meant."""
    if value is None and type(None) in get_args(annotation):
        return None
    members = [member for member in get_args(annotation) if member is not type(None)]
    problems: list[ConfigError] = []
    for member in members:
        try:
            return read(value, member, context)
        except ConfigError as error:
            problems.append(error)
    if len(members) > 1 and not isinstance(value, dict):
        raise context.wrong(value, spell(annotation))
    about_keys = [problem for problem in problems if not isinstance(problem, (BlockValueError, InvalidValueError))]
    raise (about_keys or problems)[0]


def _read_sequence(value: object, annotation: object, context: ReadContext) -> Sequence[object]:
    origin, kinds = get_origin(annotation) or annotation, get_args(annotation) or (Any, ...)
    fixed = origin is tuple and Ellipsis not in kinds
    if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(kinds)):
        hint = f" Write a list: {context.path}=[{value}]" if isinstance(value, (str, int, float)) and not fixed else ""
        raise context.wrong(value, f"a {spell(annotation)}", hint)
    below = kinds if fixed else kinds[:1] * len(value)
    items = [read(item, kind, context.below(i)) for i, (item, kind) in enumerate(zip(value, below, strict=True))]
    return tuple(items) if origin is tuple else items


def _read_mapping(value: object, annotation: object, context: ReadContext) -> dict[object, object]:
    if not isinstance(value, dict):
        raise context.wrong(value, f"a {spell(annotation)}")
    if "_target_" in value:
        _read_anything(value, context)
    key_kind, kind = get_args(annotation) or (Any, Any)
    return {read(key, key_kind, context): read(item, kind, context.below(key)) for key, item in value.items()}
