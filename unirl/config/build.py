"""Checks a recipe against the classes that it names, and builds objects from the checked nodes.

`check_node` imports the classes, whose modules import quickly, and builds config dataclasses only. `build` builds all
other objects.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from typing_extensions import get_protocol_members, is_protocol

from unirl.config.errors import (
    BlockValueError,
    ConfigError,
    IncompatibleError,
    InvalidValueError,
    PluginError,
    UnknownKeyError,
    did_you_mean,
    likeness,
    nearest,
)
from unirl.config.foreign_keys import WRITE_INSTEAD
from unirl.config.merge import Tree, join
from unirl.config.node import Node
from unirl.config.plugins import contract_of, definition, is_foreign, remember
from unirl.config.recipe import recipe_class
from unirl.config.schema import REQUIRED, Key, Schema, dotted_name, is_config, schema_of
from unirl.config.targets import find_target
from unirl.config.values import MAPPINGS, ReadContext, read, show

SPECIAL = "_target_"
MISSPELT = 0.8
"""Likeness from which on a method is taken for a misspelt one."""
SHOWN_METHODS = 3
"""Number of missing methods whose contract a message shows."""


def check_node(
    tree: object,
    expected: object = Node,
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


def build(node: Node, **wired: object) -> Any:
    """The object of a node. The node's class and every class below it get the `wired` parameters that they name."""
    missing = [name for name, needed in node.schema.wired.items() if needed and name not in wired]
    if missing:
        raise IncompatibleError(
            f"{node.path}: {node.target} asks the trainer for {', '.join(missing)}, "
            f"which is not offered here (offered: {', '.join(sorted(wired)) or 'nothing'})"
        )
    remember(node.schema.owner.__module__)
    given = {name: wired[name] for name in node.schema.wired if name in wired}
    built = {key: _make(value, wired) for key, value in node.built.items()}
    try:
        return node.schema.target(**given | dict(node.values) | built)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # Errors of a value get their path when the recipe is checked; other objects are built only for a run.
        path = "" if node.schema.is_value or str(error).startswith(node.path) else f"{node.path}: "
        raise InvalidValueError(path + str(error)) from error


def _make(value: object, wired: Mapping[str, object]) -> object:
    """A checked value with its nodes built."""
    if isinstance(value, Node):
        return build(value, **wired)
    if isinstance(value, (tuple, list)):
        return type(value)(_make(item, wired) for item in value)
    if isinstance(value, dict):
        return {key: _make(item, wired) for key, item in value.items()}
    return value


# Checks


def _read_node(value: object, expected: object, context: ReadContext) -> Node:
    if not isinstance(value, dict):
        raise context.error(
            f"{context.path} is a block of keys, got {show(value)}", BlockValueError, _keys_of(expected, context)
        )
    schema = _schema(value, expected, context)
    for name in value:
        _check_name(name, schema, context)
    values = {key.name: _read_key(key, value, context.below(key.name)) for key in schema.keys.values()}
    node = Node(context.path, schema, values, frozenset(value) - {SPECIAL}, typed=schema.target is expected)
    if schema.is_value and not _needs_trainer(node):
        _check_rules(node, context)
    return node


def _schema(tree: Tree, expected: object, context: ReadContext) -> Schema:
    """The schema of the class that the node names, or of the expected config dataclass if it names none."""
    if SPECIAL not in tree:
        if is_config(expected) and expected is not Node:
            return schema_of(expected)
        raise context.error(f"{context.path} needs a _target_: the class to build")
    schema = schema_of(find_target(tree[SPECIAL], context.path, context.plugins))
    _check_whole(schema, context)
    if inspect.isclass(expected) and expected is not Node:
        _check_fits(schema, expected, context)
    return schema


def _check_whole(schema: Schema, context: ReadContext) -> None:
    """A class must have every method that a base class of it leaves open."""
    owner, lacks = schema.owner, open_methods(schema)
    if not lacks:
        return
    if not is_foreign(owner):
        raise context.error(
            f"{context.path}: {schema.name} is a base class, which leaves {', '.join(lacks)} open", InvalidValueError,
            " Name a class that derives from it",
        )  # fmt: skip
    misspelt = [f"It has {near}: rename it. " for name in lacks for near in nearest(name, vars(owner), 1)
                if near not in lacks and likeness(name, near) >= MISSPELT]  # fmt: skip
    contracts = [line for name in lacks[:SHOWN_METHODS] for line in contract_of(owner, name)]
    text = f"{context.path}: {definition(owner)}: it has no {', '.join(lacks)}"
    raise context.error(
        text, PluginError, "\n  ".join([f" {''.join(misspelt)}Write it as its contract says", *contracts])
    )


def _check_fits(schema: Schema, expected: type, context: ReadContext) -> None:
    """A class must be a whole subclass of its parameter's annotation, or have the public methods of this Protocol."""
    lacks = lacking(schema, expected)
    if lacks:
        derived = "" if is_protocol(expected) else f" Derive the class from {dotted_name(expected)}"
        raise context.error(
            f"{context.path} must be a {expected.__name__}, and {schema.name} has no {', '.join(lacks)}",
            InvalidValueError,
            derived,
        )


def lacking(schema: Schema, expected: type) -> list[str]:
    """Names what a class lacks to be an `expected`: the base class, or the methods that are abstract or absent."""
    if is_protocol(expected):
        names = [name for name in get_protocol_members(expected) if inspect.isfunction(getattr(expected, name, None))]
        return sorted(name for name in names if inspect.getattr_static(schema.owner, name, None) is None)
    if not issubclass(schema.owner, expected):
        return [f"base {expected.__name__}"]
    return open_methods(schema)


def open_methods(schema: Schema) -> list[str]:
    """The methods that base classes of a class leave open and that it does not write."""
    # A classmethod may give back an object of another class.
    abstract = inspect.isabstract(schema.owner) and schema.target is schema.owner
    return sorted(getattr(schema.owner, "__abstractmethods__")) if abstract else []  # noqa: B009


def _read_key(key: Key, tree: Tree, context: ReadContext) -> object:
    value = tree.get(key.name, {} if key.default_target else "???")
    if key.default_target and isinstance(value, dict):
        value = {SPECIAL: key.default_target} | value
    if value != "???":
        return read(value, key.annotation, context)
    if key.default is REQUIRED:
        raise context.error(f"{context.path} is required and not set", way_out=f" Write {context.path}=...")
    return _default(key, context)


def _default(key: Key, context: ReadContext) -> object:
    """The default of a key. A default config dataclass becomes a node, so that its keys are listed as well."""
    kind: type = type(key.default)
    if not is_config(kind):
        return key.default
    schema = schema_of(kind)
    keys = [Key(sub.name, sub.annotation, getattr(key.default, sub.name)) for sub in schema.keys.values()]
    below = {sub.name: _default(sub, context.below(sub.name)) for sub in keys}
    return Node(context.path, schema, below, frozenset(), typed=kind is key.annotation)


def _needs_trainer(value: object) -> bool:
    """True if this value, or one below it, cannot be built without the trainer."""
    if isinstance(value, Node):
        return not value.schema.is_value or any(_needs_trainer(item) for item in value.built.values())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return any(_needs_trainer(item) for item in items)


# Rules of a class


def _check_rules(node: Node, context: ReadContext) -> None:
    """Builds the dataclass once, so that its `__post_init__` runs. Its error gets the path of the breaking key."""
    try:
        build(node)
    except ConfigError as error:
        keys = _breaking(node)
        path = join(node.path, keys[0]) if len(keys) == 1 else node.path
        places = "".join(context.where(join(node.path, key)) for key in keys) or context.where(node.path)
        raise type(error)(_at_path(str(error), path, node) + places) from error


def _breaking(node: Node) -> list[str]:
    """The written keys without which the class would accept the others. A single key is at fault."""
    if len(node.written) == 1:
        return list(node.written)
    others = {key: {name: node.values[name] for name in node.values if name != key} for key in sorted(node.written)}
    return [key for key, values in others.items() if _accepts(replace(node, values=values))]


def _accepts(node: Node) -> bool:
    try:
        build(node)
    except (ValueError, TypeError):  # TypeError: the constructor requires the key
        return False
    return True


def _at_path(message: str, path: str, node: Node) -> str:
    """The message with the full key path in place of the name that the class itself gives the key."""
    block, _, key = path.rpartition(".")
    first, last = block.partition(".")[0], block.rpartition(".")[2]  # of ar.sampling, and of sampling.image
    names = (path, f"{node.class_name}.{key}", f"{last}.{key}", f"{first}.{key}", key)
    for rest in (message.removeprefix(name) for name in names):
        if rest != message and rest.startswith((" ", "=")):
            return path + rest
    return f"{path}: {message}" if path else message


# Messages


def _check_name(name: object, schema: Schema, context: ReadContext) -> None:
    """Refuses a key that the class does not have."""
    if not isinstance(name, str):
        raise context.error(f"{context.path}: the key {name!r} must be text")
    path = join(context.path, name)
    if name.startswith("_") and name != SPECIAL:
        raise context.error(f"{path}: the only special key is _target_", way_out=" Remove it")
    if name != SPECIAL and name not in schema.keys:
        hint = _instead(name, schema, context)
        message = f"unknown key '{path}'{context.where(path)}.{hint}"
        raise UnknownKeyError(message if hint else f"{message} {_known(schema, context)}", path, bool(hint))


def _instead(name: str, schema: Schema, context: ReadContext) -> str:
    """The nearest key of the class, or the key to write for a name from another framework."""
    if name in schema.wired:
        return f" {schema.owner.__name__} gets '{name}' from the trainer, not from the recipe. Remove it"
    value = vars(schema.owner).get(name)
    if value is not None and not callable(value) and not isinstance(value, property):
        kind = type(value).__name__
        return f" {definition(schema.owner)} gives '{name}' no type, so it is no key. Write {name}: {kind} = {value!r}"
    if name in WRITE_INSTEAD:
        return f" Write {WRITE_INSTEAD[name]}"
    best = did_you_mean(name, schema.keys)
    return best.replace("'", f"'{context.path}.", 1) if best and context.path else best


def _known(schema: Schema, context: ReadContext) -> str:
    keys = ", ".join(schema.keys) or "none"
    return f"Keys of {context.path} ({schema.owner.__name__}): {keys}" if context.path else f"Keys of a recipe: {keys}"


def _keys_of(expected: object, context: ReadContext) -> str:
    """The way out for a single value in place of a block."""
    known = is_config(expected) and expected is not Node
    keys = f" Its keys: {', '.join(schema_of(expected).keys)}." if known else ""
    return f"{keys} Set one of them: {context.path}.<key>=..."


# The classes of a recipe that is not checked yet


def schemas_of(tree: Tree, plugins: tuple[str, ...] = ()) -> dict[str, Schema]:
    """Key path to schema of every node of an unchecked recipe, written or default; "" is the recipe itself.

    Nodes that cannot be read are left out. The check refuses them.
    """
    return dict(_schemas_below(tree, schema_of(cast(type, recipe_class(tree))), "", plugins))


def _schemas_below(tree: Tree, schema: Schema, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for key in schema.keys.values():
        value = tree.get(key.name, {} if key.default_target or is_config(type(key.default)) else None)
        yield from _schemas_at(key, value, join(path, key.name), plugins)


def _schemas_at(key: Key, value: object, path: str, plugins: tuple[str, ...]) -> Iterator[tuple[str, Schema]]:
    """The schemas of a node, or of a mapping of nodes by name such as the scorers of a weighted sum or snapshots."""
    schema = _schema_at(key, value, path, plugins)
    if not isinstance(value, dict):
        return
    if schema is not None:
        yield from _schemas_below(value, schema, path, plugins)
        return
    kind = _item_kind(key.annotation)
    for name, item in value.items():
        if isinstance(item, dict) and (SPECIAL in item or is_config(kind)):
            yield from _schemas_at(Key(name, kind, REQUIRED), item, join(path, name), plugins)


def _item_kind(annotation: object) -> object:
    """The type of the values if a mapping is annotated, alone or in a union; else Any."""
    kinds = [kind for kind in (annotation, *typing.get_args(annotation)) if typing.get_origin(kind) in MAPPINGS]
    return typing.get_args(kinds[0])[1] if kinds else Any


def _schema_at(key: Key, value: object, path: str, plugins: tuple[str, ...]) -> Schema | None:
    if not isinstance(value, dict):
        return None
    target = value.get(SPECIAL, key.default_target)
    if target is not None:
        try:
            return schema_of(find_target(target, path, plugins))
        except ConfigError:
            return None
    if typing.get_origin(key.annotation) in MAPPINGS:
        return None
    kinds = [kind for kind in (key.annotation, *typing.get_args(key.annotation), type(key.default)) if is_config(kind)]
    return schema_of(kinds[0]) if kinds else None
