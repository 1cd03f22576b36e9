"""The keys that a recipe may write, with type, default and docstring: the signatures, as a listing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unirl.config.layers import join
from unirl.config.node import Node, is_held, plain
from unirl.config.schema import REQUIRED, Schema, docs_of
from unirl.config.values import show, spell


@dataclass(frozen=True)
class KeyDoc:
    """One line of the listing."""

    path: str
    kind: str
    """The type, as a person would say it."""
    default: str
    """As YAML; "required" if there is none."""
    doc: str

    def line(self) -> str:
        """`sampling.height: int = 512  Pixels.`"""
        return f"{self.path}: {self.kind} = {self.default}" + (f"  {self.doc}" if self.doc else "")


def list_keys(node: Node) -> Iterator[KeyDoc]:
    """Every key of a checked node and of the nodes below it."""
    yield from schema_keys(node.schema, node.path)
    for value in node.values.values():
        if isinstance(value, Node):
            yield from list_keys(value)


def schema_keys(schema: Schema, path: str = "") -> Iterator[KeyDoc]:
    """The keys of one class."""
    docs = docs_of(schema.owner)
    for key in schema.keys.values():
        default = key.default_target or _default(key.default)
        kind = "block" if is_held(key) else spell(key.annotation)
        yield KeyDoc(join(path, key.name), kind, default, docs.get(key.name, ""))


def _default(value: Any) -> str:
    return "required" if value is REQUIRED else show(plain(value))
