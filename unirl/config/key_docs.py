"""The keys that a recipe may write, with type, default and docstring, read from the classes that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unirl.config.merge import join
from unirl.config.node import Node, is_held, nodes_below, plain
from unirl.config.schema import REQUIRED, Key, is_config
from unirl.config.values import show, spell


@dataclass(frozen=True)
class KeyDoc:
    """The documentation of one key."""

    path: str
    type: str  # as a message spells it
    default: str  # as YAML; "required" if there is none
    doc: str

    def line(self) -> str:
        """`sampling.height: int = 512  Pixels.`"""
        return f"{self.path}: {self.type} = {self.default}  {self.doc}".rstrip()


def list_keys(root: Node) -> Iterator[KeyDoc]:
    """Every key of a checked node, and then those of the nodes below it."""
    for node in nodes_below(root):
        docs = docs_of(node.schema.owner)
        for key in node.schema.keys.values():
            is_block = is_held(key) or is_config(type(key.default))
            kind = "block" if is_block else spell(key.annotation)
            yield KeyDoc(join(node.path, key.name), kind, _default(key), docs.get(key.name, ""))


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


def _default(key: Key) -> str:
    if is_config(type(key.default)):
        return type(key.default).__name__
    return key.default_target or ("required" if key.default is REQUIRED else show(plain(key.default)))
