"""The layer of the command line, in Hydra's grammar.

`key=value`, `+key=value` and `++key=value` all set a key, and `~key` removes one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from unirl.config.errors import BlockValueError, ConfigError, InvalidValueError, did_you_mean
from unirl.config.merge import DELETED, Layer, Tree, fold, get, join, put

COMMAND_LINE = "command line"


def command_line_layer(overrides: Sequence[str], below: Tree) -> Layer:
    tree: Tree = {}
    places: dict[str, str] = {}
    for text in overrides:
        path, value = _read_override(text)
        current = fold((Layer("", below), Layer("", tree)))
        if value is DELETED:
            _check_deletable(path, current, text)
        else:
            _check_settable(path, value, current)
        put(tree, path, value)
        places[path] = text
    return Layer(COMMAND_LINE, tree, places)


def _read_override(text: str) -> tuple[str, Any]:
    """Key path and value of one override; DELETED for `~key`."""
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"'{text}' is not a setting: write key=value")
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise InvalidValueError(
            f"cannot read the override '{text}': {str(error).splitlines()[0]}. Text with blanks or special characters "
            "goes in quotes within quotes: 'key=\"some text\"'"
        ) from error
    return _path_of(override, text), _value_of(override, text)


def _path_of(override: Override, text: str) -> str:
    path = override.key_or_group
    if override.package is not None or "/" in path:
        raise ConfigError(f"'{text}' selects a config group, which recipes do not have. Set the key: block.key=value")
    if not all(path.split(".")):
        raise ConfigError(f"'{text}': '{path}' is not a key path such as sampling.height")
    return path


def _value_of(override: Override, text: str) -> Any:
    if override.is_delete():
        return DELETED
    if override.is_sweep_override():
        raise InvalidValueError(f"'{text}' gives several values, and a run takes one. Write a list as [1,2]")
    return _plain(override.value())


def _plain(value: Any) -> Any:
    """A parsed value without quotes, at every depth."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _check_deletable(path: str, current: Tree, text: str) -> None:
    missing = object()
    if get(current, path, missing) is missing:
        known = [key for key, _ in _all_paths(current)]
        raise ConfigError(f"'{text}': the recipe does not write '{path}'.{did_you_mean(path, known)}")


def _check_settable(path: str, value: Any, current: Tree) -> None:
    """A scalar may not replace a block, and an item may not replace a list."""
    fold((Layer("", current), Layer("", _nest(path, value))))
    node = get(current, path)
    if isinstance(node, dict) and node and not isinstance(value, dict) and value is not None:
        keys = [key for key in node if key != "_target_"] or ["_target_"]
        first = "path" if "path" in keys else keys[0]
        raise BlockValueError(
            f"{path}={value} would replace the block '{path}' (keys {', '.join(keys)}) with a single value. "
            f"Set one of its keys: {path}.{first}={value}"
        )


def _nest(path: str, value: Any) -> Tree:
    tree: Tree = {}
    put(tree, path, copy.deepcopy(value))
    return tree


def _all_paths(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        below = join(path, key)
        yield below, value
        if isinstance(value, dict):
            yield from _all_paths(value, below)
