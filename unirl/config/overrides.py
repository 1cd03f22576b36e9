"""The layer of the command line, in Hydra's grammar.

`key=value`, `+key=value` and `++key=value` all set a key, and `~key` removes one. A block may be set to the name of an
option, such as `rollout=server`: the blocks of `options/rollout/server.yaml` then take the place of the recipe's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from unirl.config.errors import BlockValueError, ConfigError, InvalidValueError, did_you_mean
from unirl.config.merge import DELETED, ConfigLayer, Tree, fold, get, join, put
from unirl.config.recipe import policy_keys
from unirl.types.secrets import redact_setting

PLAIN = re.compile(r"[\w\-./+:%@*?|]*", re.ASCII)
"""A value that the grammar reads as one word or number."""
INTERPRETED = "[]{}()'\",\\$="
"""Letters with a meaning in the grammar."""
OPTIONS = Path(__file__).with_name("options")
"""`<block>/<name>.yaml` has the blocks that `block=name` sets."""
COMMAND_LINE = "command line"
SEED = "sampling.seed"


def command_line_layer(overrides: Sequence[str], below: Tree) -> ConfigLayer:
    tree: Tree = {}
    places: dict[str, str] = {}
    for text in overrides:
        written, value = _read_override(text)
        for path in _paths(written, below):
            current = fold((ConfigLayer("", below), ConfigLayer("", tree)))
            if value is DELETED and get(current, path, DELETED) is DELETED:
                hint = did_you_mean(path, _all_paths(current))
                raise ConfigError(f"'{text}': the recipe does not write '{path}'.{hint}")
            chosen = option(path, value)
            if not chosen and value is not DELETED:
                _check_settable(path, value, current)
            for block, setting in (chosen or {path: value}).items():
                put(tree, block, setting)
                places[block] = text
    return ConfigLayer(COMMAND_LINE, tree, places)


def option(path: str, value: object) -> dict[str, object]:
    """The blocks that `block=name` sets. Empty if the block has no option of that name."""
    parent, _, block = path.rpartition(".")
    if not isinstance(value, str) or value not in options_of(block):
        return {}
    file = OPTIONS / block / f"{value}.yaml"
    return {join(parent, name): setting for name, setting in yaml.safe_load(file.read_text(encoding="utf-8")).items()}


def options_of(block: str) -> list[str]:
    """The names of the options of a block, such as `server` of the block `rollout`."""
    return sorted(file.stem for file in (OPTIONS / block).glob("*.yaml"))


def _paths(path: str, below: Tree) -> list[str]:
    """The keys that a written key sets. `sampling.seed` is the seed of every policy of a recipe."""
    return policy_keys(below, path) if path == SEED else [path]


def _read_override(text: str) -> tuple[str, object]:
    """Key path and value of one override; DELETED for `~key`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    shown = redact_setting(text)
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"'{shown}' is not a setting: write key=value")
    group, _, name = text.partition("=")
    if group.lstrip("+").endswith("base/distributed") and name in options_of("placement"):
        raise ConfigError(f"'{shown}' selects a preset of VRL. Write +placement={name}")
    try:
        (override,) = OverridesParser.create().parse_overrides([_quoted(text)])
    except HydraException as error:
        raise InvalidValueError(
            f"cannot read the setting '{shown}'. Text with brackets, commas, quotes or $ goes in quotes within "
            "quotes: 'key=\"some text\"'"
        ) from error
    path = override.key_or_group
    if override.package is not None or "/" in path:
        raise ConfigError(f"'{shown}' selects a config group, which recipes do not have. Set the key: block.key=value")
    if not all(path.split(".")):
        raise ConfigError(f"'{shown}': '{path}' is not a key path such as sampling.height")
    if override.is_delete():
        return path, DELETED
    if override.is_sweep_override():
        raise InvalidValueError(f"'{shown}' gives several values, and a run takes one. Write a list as [1,2]")
    return path, _plain(override.value())


def _quoted(text: str) -> str:
    """The setting with its value in quotes if that has a letter that the grammar lacks and none that it interprets."""
    key, equals, value = text.partition("=")
    if not equals or PLAIN.fullmatch(value) or not value.strip() or any(letter in INTERPRETED for letter in value):
        return text
    return f'{key}="{value}"'


def _plain(value: object) -> object:
    """A parsed value without quotes, at every depth."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _check_settable(path: str, value: object, current: Tree) -> None:
    """A scalar may not replace a block, and an item may not replace a list."""
    nested: Tree = {}
    put(nested, path, copy.deepcopy(value))
    fold((ConfigLayer("", current), ConfigLayer("", nested)))
    node = get(current, path)
    if node is None and isinstance(value, str) and options_of(path.rpartition(".")[2]):
        raise BlockValueError(f"{path}={value} is not one of the options of this block. {_way_to_set(path, value, [])}")
    if isinstance(node, dict) and node and not isinstance(value, dict) and value is not None:
        keys = [key for key in node if key != "_target_"] or ["_target_"]
        raise BlockValueError(
            f"{path}={value} would replace the block '{path}' (keys {', '.join(keys)}) with a single value. "
            f"{_way_to_set(path, value, keys)}"
        )


def _way_to_set(path: str, value: object, keys: Sequence[str]) -> str:
    """The way out for a single value in place of a block."""
    if path.partition(".")[0] == "reward":
        return "Another reward is a class: reward.backend='{_target_: ...}'. `unirl reward ls NAME` prints it"
    if names := options_of(path.rpartition(".")[2]):
        hint = did_you_mean(str(value), names).strip()
        return f"{hint or 'Choose'} {path}={'|'.join(names)}, or another class: {path}='{{_target_: package.Class}}'"
    if "path" in keys:
        return f"Set one of its keys: {path}.path={value}"
    return f"Set one of its keys ({path}.{keys[0]}=...), or replace the block: {path}='{{_target_: package.Class}}'"


def _all_paths(tree: Tree, path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield join(path, key)
        if isinstance(value, dict):
            yield from _all_paths(value, join(path, key))
