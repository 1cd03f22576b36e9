"""Checks a recipe against the classes that it names, and builds objects from the checked nodes.

`check_node` imports the classes, whose modules import quickly, and builds config dataclasses only. `build` builds all
other objects.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unirl.config.errors import (
    BlockValueError,
    ConfigError,
    IncompatibleError,
    InvalidValueError,
    UnknownKeyError,
    did_you_mean,
)
from unirl.config.foreign_keys import WRITE_INSTEAD
from unirl.config.merge import Tree, join
from unirl.config.node import Node
from unirl.config.recipe import RecipeConfig
from unirl.config.schema import REQUIRED, Key, Schema, is_config, schema_of
from unirl.config.targets import find_target
from unirl.config.values import ReadContext, read, show

SPECIAL = "_target_"


def check_node(
    tree: Any,
    expected: Any = Node,
    path: str = "",
    plugins: tuple[str, ...] = (),
    where: Callable[[str], str] = lambda path: "",
) -> Node:
    """The node that `tree` describes, with all keys checked and defaults filled in.

    Args:
        tree: YAML data, interpolations resolved.
        expected: the class that the node must have; `Node` for any class. A config dataclass needs no `_target_`.
        where: key path to the file and line that set it, for messages.

    Raises:
        ConfigError: 2003 unknown or missing key, 2004 type or range, 2005 scalar for a block, 2030 unsafe target.
    """
    return _read_node(tree, expected, ReadContext(path, where, plugins, _read_node))


def build(node: Node, **wired: Any) -> Any:
    """The object of a node. The node's class and every class below it get the `wired` parameters that they name."""
    missing = [name for name, needed in node.schema.wired.items() if needed and name not in wired]
    if missing:
        raise IncompatibleError(
            f"{node.path}: {node.target} asks the trainer for {', '.join(missing)}, "
            f"which is not offered here (offered: {', '.join(sorted(wired)) or 'nothing'})"
        )
    given = {name: wired[name] for name in node.schema.wired if name in wired}
    return _call(node, given | _arguments(node, wired))


def _arguments(node: Node, wired: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a node's keys, with the nodes below built."""
    return dict(node.values) | {key: _make(value, wired) for key, value in node.built.items()}


def _make(value: Any, wired: Mapping[str, Any]) -> Any:
    """A checked value with its nodes built."""
    if isinstance(value, Node):
        return build(value, **wired)
    if isinstance(value, (tuple, list)):
        return type(value)(_make(item, wired) for item in value)
    if isinstance(value, dict):
        return {key: _make(item, wired) for key, item in value.items()}
    return value


def _call(node: Node, arguments: Mapping[str, Any], where: Callable[[str], str] = lambda path: "") -> Any:
    """Calls the target. A ValueError about one of its keys becomes a ConfigError that names the key path."""
    try:
        return node.schema.target(**arguments)
    except ValueError as error:
        path, message = _located(str(error), node)
        if isinstance(error, ConfigError) and not isinstance(error, UnknownKeyError):
            raise type(error)(message + where(path)) from error
        if type(error) is ValueError and (node.schema.is_value or path != node.path):
            raise InvalidValueError(message + where(path)) from error
        raise


def _located(message: str, node: Node) -> tuple[str, str]:
    """The key path of a message, and the message with this path: `LoraConfig.rank` -> `backend.lora_cfg.rank`.

    The key is read from the text, since classes of `types` and `sde` raise plain ValueErrors.
    """
    spelled = re.match(r"(?:[\w.]+\.)?(\w+)(?=[ =])", message)
    if spelled and spelled[1] in node.values:
        path = _join(node.path, spelled[1])
        return path, path + message[spelled.end() :]
    return node.path, f"{node.path}: {message}" if node.path else message


def _read_node(value: Any, expected: Any, context: ReadContext) -> Node:
    if not isinstance(value, dict):
        raise context.error(
            f"{context.path} is a block of keys, got {show(value)}", BlockValueError, _keys_of(value, expected, context)
        )
    schema = _schema(value, expected, context)
    _refuse_special(value, context)
    _refuse_unknown(value, schema, context)
    values = {key.name: _read_key(key, value, context) for key in schema.keys.values()}
    node = Node(context.path, schema, values, frozenset(value) - {SPECIAL}, typed=schema.target is expected)
    if schema.is_value:
        _check_rules(node, context)
    return node


def _check_rules(node: Node, context: ReadContext) -> None:
    """Builds the dataclass once, so that its `__post_init__` runs, unless a node below needs the trainer."""
    if not _needs_trainer(node):
        _call(node, _arguments(node, {}), context.where)


def _needs_trainer(value: Any) -> bool:
    """True if this value, or one below it, cannot be built without the trainer."""
    if isinstance(value, Node):
        return not value.schema.is_value or any(_needs_trainer(item) for item in value.built.values())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return any(_needs_trainer(item) for item in items)


def _schema(tree: Mapping[str, Any], expected: Any, context: ReadContext) -> Schema:
    """The schema of the class that the node names, or of the expected config dataclass if it names none."""
    if SPECIAL not in tree:
        if is_config(expected) and expected is not Node:
            return schema_of(expected)
        raise context.error(f"{context.path} needs a _target_: the class to build")
    target = find_target(tree[SPECIAL], context.path, context.plugins)
    schema = schema_of(target)
    _check_fits(schema, expected, context)
    return schema


def _check_fits(schema: Schema, expected: Any, context: ReadContext) -> None:
    """A class must be a subclass of its parameter's annotation, or have the methods of this Protocol."""
    if expected is Node or not inspect.isclass(expected):
        return
    if expected.__dict__.get("_is_protocol"):
        lacks = [name for name in _methods(expected) if inspect.getattr_static(schema.owner, name, None) is None]
    else:
        lacks = [] if issubclass(schema.owner, expected) else [f"base {expected.__name__}"]
    if lacks:
        raise context.error(
            f"{context.path} must be a {expected.__name__}, and {schema.name} has no {', '.join(lacks)}",
            InvalidValueError,
        )


def _methods(protocol: type) -> list[str]:
    """The public methods of a Protocol."""
    bases = [base for base in protocol.__mro__ if base.__dict__.get("_is_protocol")]
    names = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
    return sorted(name for name in names if not name.startswith("_"))


def _read_key(key: Key, tree: Mapping[str, Any], context: ReadContext) -> Any:
    below = context.below(key.name)
    if key.default_target is not None:
        return _read_default_node(key, tree, below)
    if key.name in tree and tree[key.name] != "???":
        return read(tree[key.name], key.annotation, below)
    if key.default is REQUIRED:
        raise context.error(f"{below.path} is required and not set", way_out=f" Write {below.path}=...")
    return _default(key, below)


def _read_default_node(key: Key, tree: Mapping[str, Any], context: ReadContext) -> Any:
    value = tree.get(key.name)
    if value is None and key.name not in tree:
        value = {}
    target = {SPECIAL: key.default_target}
    return read(target | value if isinstance(value, dict) else value, key.annotation, context)


def _default(key: Key, context: ReadContext) -> Any:
    """The default of a key. A default config dataclass becomes a node, so that its keys are listed as well."""
    kind: Any = type(key.default)
    if not is_config(kind):
        return key.default
    schema = schema_of(kind)
    keys = [Key(sub.name, sub.annotation, getattr(key.default, sub.name)) for sub in schema.keys.values()]
    below = {sub.name: _default(sub, context.below(sub.name)) for sub in keys}
    return Node(context.path, schema, below, frozenset(), typed=kind is key.annotation)


def _keys_of(value: Any, expected: Any, context: ReadContext) -> str:
    """The way out for a single value in place of a block."""
    known = is_config(expected) and expected is not Node
    keys = f" Its keys: {', '.join(schema_of(expected).keys)}." if known else ""
    return f"{keys} Set one of them: {context.path}.<key>={show(value)}"


def _refuse_special(tree: Mapping[str, Any], context: ReadContext) -> None:
    for name in tree:
        if not isinstance(name, str):
            raise context.error(f"{context.path}: the key {name!r} must be text")
        if name.startswith("_") and name != SPECIAL:
            raise context.error(f"{_join(context.path, name)}: the only special key is _target_", way_out=" Remove it")


def _refuse_unknown(tree: Mapping[str, Any], schema: Schema, context: ReadContext) -> None:
    for name in tree:
        if name != SPECIAL and name not in schema.keys:
            path = _join(context.path, name)
            hint = _instead(name, schema, context)
            message = f"unknown key '{path}'{context.where(path)}.{hint}"
            raise UnknownKeyError(message if hint else f"{message} {_known(schema, context)}", path, bool(hint))


def _instead(name: str, schema: Schema, context: ReadContext) -> str:
    """The nearest key of the class, or the key to write for a name from another framework."""
    if name in schema.wired:
        return f" {schema.owner.__name__} gets '{name}' from the trainer, not from the recipe. Remove it"
    if name in WRITE_INSTEAD:
        return f" Write {WRITE_INSTEAD[name]}"
    best = did_you_mean(name, schema.keys)
    return best.replace("'", f"'{context.path}.", 1) if best and context.path else best


def _known(schema: Schema, context: ReadContext) -> str:
    keys = ", ".join(schema.keys) or "none"
    return f"Keys of {context.path} ({schema.owner.__name__}): {keys}" if context.path else f"Keys of a recipe: {keys}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# The classes of a recipe that is not checked yet


def schemas_of(tree: Tree, plugins: tuple[str, ...] = ()) -> dict[str, Schema]:
    """Key path to schema of every node of an unchecked recipe, written or default; "" is the recipe itself."""
    return dict(_schemas(tree, schema_of(RecipeConfig), "", plugins))


def _schemas(tree: Any, schema: Schema, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """The nodes at and below `tree`. A node that cannot be read is skipped here, and refused by the check."""
    yield path, schema
    for key in schema.keys.values():
        value = tree.get(key.name, {} if key.default_target or is_config(type(key.default)) else None)
        place = join(path, key.name)
        below = _schema_at(key, value, place, plugins)
        if below is not None:
            yield from _schemas(value, below, place, plugins)
        elif isinstance(value, dict):
            yield from _by_name(value, place, plugins)


def _by_name(nodes: Tree, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """The nodes of a mapping by name, such as the scorers of a weighted sum."""
    for name, value in nodes.items():
        if isinstance(value, dict) and SPECIAL in value:
            below = _schema_at(Key(name, Any), value, join(path, name), plugins)
            if below is not None:
                yield from _schemas(value, below, join(path, name), plugins)


def _schema_at(key: Key, value: Any, path: str, plugins: tuple[str, ...]) -> Schema | None:
    if not isinstance(value, dict):
        return None
    target = value.get(SPECIAL, key.default_target)
    if target is not None:
        try:
            return schema_of(find_target(target, path, plugins))
        except ConfigError:
            return None
    kinds = [kind for kind in (key.annotation, *typing.get_args(key.annotation), type(key.default)) if is_config(kind)]
    return schema_of(kinds[0]) if kinds else None
