"""Configuration as a stack of layers, which record where every value was set.

    recipe it extends < recipe < environment < scale=toy < command line

Later layers win. Mappings merge key by key, except that a node whose `_target_` differs replaces the node below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from unirl.config.errors import BlockValueError
from unirl.config.recipe import POLICIES, RecipeConfig

DEFAULT_TARGETS = {block.name: block.metadata["target"] for block in fields(RecipeConfig) if "target" in block.metadata}
"""Block to the class that it has if the recipe names none."""

Tree = dict[str, object]
"""YAML data: mappings with string keys, lists and scalars."""


class _Deleted:
    """Marks a key that `~key` removes."""

    def __repr__(self) -> str:
        return "(deleted)"


DELETED: Final = _Deleted()


@dataclass(frozen=True)
class ConfigLayer:
    """The settings of one source."""

    source: str  # "command line", "environment", "scale=toy", "recipe", "option"
    tree: Tree
    places: Mapping[str, str] = field(default_factory=dict)
    """Key path to the place that sets it: `sd3_trainside.yaml:12`, `PRETRAINED_MODEL`, `batch_size=4`."""

    def place(self, path: str) -> str:
        """The place that sets `path` in this layer: the nearest one recorded at the path or above it."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places.get(path, "")


@dataclass(frozen=True)
class Origin:
    """The value that one layer sets for a key."""

    source: str
    place: str
    value: object
    wins: bool

    @property
    def file(self) -> str:
        """The place without its line."""
        return self.place.partition(":")[0]


def fold(layers: Sequence[ConfigLayer]) -> Tree:
    """The layers merged into one tree, the last one on top."""
    tree: Tree = {}
    for layer in layers:
        tree = _merge_mappings(tree, layer.tree, "")
    return tree


def origins(layers: Sequence[ConfigLayer], folded: Tree, path: str) -> list[Origin]:
    """Every layer that sets `path`, the last one first; `wins` marks the one in effect.

    Args:
        folded: the layers merged into one tree.
    """
    values = [(layer, value) for layer in layers for value in _lookup(layer.tree, path)]
    effective = list(_lookup(folded, path))
    top = len(values) - 1
    return [
        Origin(layer.source, layer.place(path), value, wins=bool(effective) and index == top)
        for index, (layer, value) in reversed(list(enumerate(values)))
    ]


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every key path that holds a scalar, a list or an empty mapping, with its value."""
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        yield from leaves(value, join(path, key))


def join(path: str, key: object) -> str:
    """`path.key`."""
    return f"{path}.{key}" if path else str(key)


def get(tree: Tree, path: str, default: object = None) -> object:
    """The value at a key path, or `default`."""
    for value in _lookup(tree, path):
        return value
    return default


def put(tree: Tree, path: str, value: object) -> None:
    """Sets the value at a key path, and creates the mappings above it."""
    *parents, last = path.split(".")
    for key in parents:
        below = tree.get(key)
        if not isinstance(below, dict):
            below = tree[key] = {}
        tree = below
    below = tree.get(last)
    both = isinstance(below, dict) and isinstance(value, dict)
    tree[last] = _merge(below, value, path) if both else value


def _lookup(tree: object, path: str) -> Iterator[object]:
    """The value at a key path, or nothing if there is none."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return
        tree = tree[key]
    if tree is not DELETED:
        yield tree


def _merge(below: object, above: object, path: str) -> object:
    if not isinstance(above, dict):
        return above
    if isinstance(below, list):
        raise BlockValueError(f"{path} is a list of {len(below)} items: write the whole list, {path}=[...]")
    return _merge_mappings(below if isinstance(below, dict) else {}, above, path)


def _block(path: str) -> str:
    """The name of a block, without that of its policy."""
    policy, _, block = path.partition(".")
    return block if policy in POLICIES else path


def _merge_mappings(below: Tree, above: Tree, path: str) -> Tree:
    """`above` merged over `below`, or `above` alone if their `_target_`s, written or default, differ."""
    targets = below.get("_target_", DEFAULT_TARGETS.get(_block(path))), above.get("_target_")
    replaced = None not in targets and targets[0] != targets[1]
    merged = {} if replaced else dict(below)
    for key, value in above.items():
        if value is DELETED:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value, join(path, key))
    return merged
