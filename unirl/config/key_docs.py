"""The keys that a recipe may write, with type, default and docstring, read from the classes that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from unirl.config.merge import join
from unirl.config.node import Node, is_held, nodes_below, plain
from unirl.config.schema import REQUIRED, Key, Schema, is_config
from unirl.config.values import show, spell


@dataclass(frozen=True)
class KeyDoc:
    """The documentation of one key."""

    path: str
    type: str  # as a message spells it
    default: str  # as YAML; "required" if there is none
    doc: str
    value: str = ""
    """The value in effect, as YAML; the class of a block. Empty if the key belongs to no checked node."""

    def line(self) -> str:
        """`sampling.height: int = 64 (default 512)`."""
        if self.value in ("", self.default):
            return f"{self.path}: {self.type} = {self.default}"
        default = "required" if self.default == "required" else f"default {self.default}"
        return f"{self.path}: {self.type} = {self.value} ({default})"

    def is_within(self, part: str) -> bool:
        """True if `part` is this key, or a block that holds it."""
        return f"{self.path}.".startswith(f"{part}.")


def list_keys(root: Node) -> Iterator[KeyDoc]:
    """Every key of a checked node, and then those of the nodes below it."""
    for node in nodes_below(root):
        for doc in keys_of(node.schema, node.path):
            yield replace(doc, value=_value(node.values[doc.path.removeprefix(f"{node.path}.")]))


def keys_of(schema: Schema, path: str = "") -> Iterator[KeyDoc]:
    """The keys of a class, as they are written in the block at `path`."""
    docs = docs_of(schema.owner)
    for key in schema.keys.values():
        is_block = is_held(key) or is_config(type(key.default))
        kind = "block" if is_block else spell(key.annotation, ranges=True)
        configs = [part for part in (type(key.default), key.annotation, *get_args(key.annotation)) if is_config(part)]
        doc = docs.get(key.name) or "".join(map(summary_of, configs[:1]))
        yield KeyDoc(join(path, key.name), kind, _default(key), doc)


def summary_of(target: Callable[..., object]) -> str:
    """The first paragraph of a docstring, in one line: of a class, else of the nearest base that was given one."""
    docs = [(base.__name__, base.__doc__) for base in target.__mro__] if inspect.isclass(target) else []
    written = [doc for name, doc in docs if doc and not doc.startswith(f"{name}(")]  # Dataclasses get their signature.
    doc = inspect.cleandoc(written[0]) if written else inspect.getdoc(target) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def docs_of(cls: type) -> dict[str, str]:
    """Key to its docstring: the string below a dataclass field, or the `Args:` entry of a class or constructor."""
    import docstring_parser

    docs: dict[str, str] = {}
    for base in [base for base in reversed(cls.__mro__) if base.__module__ != "builtins"]:
        # The parser needs the line break before `Args:`, which inspect.getdoc removes.
        init = docstring_parser.parse(vars(base)["__init__"].__doc__ or "") if "__init__" in vars(base) else None
        params = [*docstring_parser.parse_from_object(base).params, *(init.params if init else [])]
        docs |= {param.arg_name: " ".join((param.description or "").split()) for param in params}
    return docs


def _value(value: object) -> str:
    if isinstance(value, Node):
        return value.class_name if value.typed and value.schema.is_value else value.target
    return show(plain(value))


def _default(key: Key) -> str:
    if is_config(type(key.default)):
        return type(key.default).__name__
    return key.default_target or ("required" if key.default is REQUIRED else show(plain(key.default)))
