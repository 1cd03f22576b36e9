"""A checked block of a recipe: a class, and the values of its keys."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from unirl.config.schema import Key, Schema, dotted_name

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Node:
    """A checked mapping with a `_target_`, or one whose class follows from the annotation of its parameter."""

    path: str
    schema: Schema
    values: Mapping[str, object]
    """Every key, with defaults filled in. A value is a scalar, a tuple, list or dict, or a Node."""
    written: frozenset[str]
    """The keys that the recipe writes."""
    typed: bool = False
    """True if the parameter's annotation is this class, so that `_target_` need not be written."""

    @property
    def target(self) -> str:
        """The dotted name of the class."""
        return self.schema.name

    @property
    def class_name(self) -> str:
        """The name of the class without its module, for messages."""
        return self.schema.owner.__name__

    @property
    def built(self) -> dict[str, object]:
        """The values that are built before the class is. The class keeps the other nodes and builds them later."""
        return {name: value for name, value in self.values.items() if not is_held(self.schema.keys[name])}

    def get(self, key: str, kind: type[ValueT]) -> ValueT | None:
        """The value of `key` if it is an instance of `kind`. None if it is not, or if the class has no such key."""
        value = self.values.get(key)
        return value if isinstance(value, kind) else None

    def require(self, key: str, kind: type[ValueT]) -> ValueT:
        """The value of `key`, an instance of `kind`. Raises KeyError otherwise."""
        value = self.get(key, kind)
        if value is None:
            raise KeyError(f"{self.path}.{key} of {self.target} is not of type {kind.__name__}")
        return value

    def resolved(self) -> dict[str, object]:
        """YAML data with every key, as in config/resolved.yaml."""
        head = {} if self.typed else {"_target_": self.target}
        return head | {key: plain(value) for key, value in self.values.items()}


def is_held(key: Key) -> bool:
    """True if the parameter takes the checked node itself, because it is annotated with Node."""
    return Node in (key.annotation, *typing.get_args(key.annotation))


def nodes_below(value: object) -> Iterator[Node]:
    """A node and every node inside it."""
    if isinstance(value, Node):
        yield value
        value = value.values
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from nodes_below(item)


def plain(value: object) -> object:
    """A checked value as YAML data. A dataclass instance, such as a default, is written with its class."""
    if isinstance(value, Node):
        return value.resolved()
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"_target_": dotted_name(type(value))} | {name: plain(getattr(value, name)) for name in fields}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
