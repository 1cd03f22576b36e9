"""Composition: a recipe's YAML, the recipe it extends, and the command line, in Hydra's grammar.

Of Hydra, its override grammar is used; `@hydra.main` and `instantiate` are not. `key=value`, `+key=value` and
`++key=value` all set; `~key` takes away. What may be set is judged afterwards, by `build.check_node`.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirl.config.errors import ConfigError, did_you_mean
from unirl.config.layers import DELETED, Layer, Origin, Tree, fold, get, join, leaves, origins, put
from unirl.config.recipes import RecipeFile, find_recipe

COMMAND_LINE = "command line"

ENVIRONMENT: Mapping[str, str] = {
    "PRETRAINED_MODEL": "bundle.path",
    "DATA_PATH": "data_source.data_path",
    "EVAL_DATA_PATH": "evaluation.data_path",
    "OUTPUT_DIR": "run.dir",
    "WANDB_PROJECT": "run.project",
    "WANDB_RUN_NAME": "run.name",
    "WANDB_ENTITY": "tracking.entity",
}
"""Variables that set a key of any recipe: paths, and the identity of the run."""


@dataclass(frozen=True)
class ComposedConfig:
    """A recipe with everything that was said about it, by layers; nothing is judged yet."""

    recipe: RecipeFile
    layers: tuple[Layer, ...]

    @property
    def tree(self) -> Tree:
        """The composed recipe, interpolations as written."""
        return fold(self.layers)

    def resolved(self) -> Tree:
        """The composed recipe with `${...}` replaced."""
        return resolve(self.tree, self.where)

    def why(self, path: str) -> list[Origin]:
        """Every layer that sets a key, the one in effect first; none when it has its default."""
        return origins(self.layers, path)

    def where(self, path: str) -> str:
        """` (sd3_trainside.yaml:12)` or ` (command line: batch_size=4)`; "" when no layer sets the key."""
        for origin in self.why(path)[:1]:
            place = f"{origin.source}: {origin.place}" if origin.source != "recipe" else origin.place
            return f" ({place})" if origin.place else f" ({origin.source})"
        return ""

    def under_command_line(self, layer: Layer) -> ComposedConfig:
        """With one more layer, just below the command line."""
        return replace(self, layers=(*self.layers[:-1], layer, self.layers[-1]))

    def text(self, resolve_all: bool = False) -> str:
        """YAML as Hydra's `--cfg job [--resolve]` prints it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.resolved() if resolve_all else self.tree))


def compose(recipe: str, overrides: Sequence[str] = (), search: tuple[Path, ...] | None = None) -> ComposedConfig:
    """The recipe called `recipe` (or the YAML file at that path) with `overrides`, and the environment's paths.

    Raises:
        UsageError: 2001 for an unknown recipe.
        ConfigError: 2003 to 2005 for YAML or overrides that cannot be read.
    """
    found = find_recipe(recipe, search)
    files = _file_layers(found.path)
    environment = _environment_layer(fold(files))
    below = (*files, environment)
    return ComposedConfig(found, (*below, _command_line_layer(overrides, fold(below))))


# Files


def _file_layers(path: Path) -> tuple[Layer, ...]:
    """The recipe, above the one recipe of its folder that it extends, if any."""
    tree = _read(path)
    base = _base_of(tree.pop("defaults", None), path)
    layer = Layer("recipe", tree, _places(path))
    if base is None:
        return (layer,)
    below = _read(base)
    if "defaults" in below:
        raise ConfigError(f"{path.name} extends {base.name}, which extends another: a variant extends a whole recipe")
    return (Layer("recipe", below, _places(base)), layer)


def _base_of(defaults: Any, path: Path) -> Path | None:
    if defaults is None or defaults == ["_self_"]:
        return None
    is_form = isinstance(defaults, list) and len(defaults) == 2 and defaults[1] == "_self_"
    if not is_form or not isinstance(defaults[0], str) or not defaults[0].isidentifier():
        raise ConfigError(
            f"{path.name}: defaults={defaults} must be [<one recipe of the same folder>, _self_]", code=2004
        )
    base = path.with_name(f"{defaults[0]}.yaml")
    if not base.is_file():
        names = [file.stem for file in path.parent.glob("*.yaml") if file != path]
        raise ConfigError(
            f"{path.name} extends '{defaults[0]}': no {base.name} beside it.{did_you_mean(base.stem, names)}"
        )
    return base


def _read(path: Path) -> Tree:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_one_line(error)}", code=2004) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of blocks, got {type(tree).__name__}", code=2004)
    return {str(key): value for key, value in tree.items()}


def _places(path: Path) -> dict[str, str]:
    """Key path to `file.yaml:line`."""
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return {key: f"{path.name}:{line}" for key, line in _lines(root, "")}


def _lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        below = join(path, key.value)
        yield below, key.start_mark.line + 1
        yield from _lines(value, below)


# Environment


def _environment_layer(recipe: Tree) -> Layer:
    """The path variables that are set, where the recipe does not itself read them."""
    tree: Tree = {}
    places: dict[str, str] = {}
    for name, path in ENVIRONMENT.items():
        value = os.environ.get(name, "")
        block = path.partition(".")[0]
        has_block = block in recipe or block in ("run", "evaluation", "tracking")
        if value and has_block and f"oc.env:{name}" not in str(get(recipe, path)):
            put(tree, path, value)
            places[path] = name
    return Layer("environment", tree, places)


# Command line


def _command_line_layer(overrides: Sequence[str], below: Tree) -> Layer:
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
        raise ConfigError(f"'{text}' sets nothing: write key=value", code=2003)
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException as error:
        raise ConfigError(
            f"cannot read the override '{text}': {_one_line(error)}. Text with blanks or special characters "
            "goes in quotes within quotes: 'key=\"some text\"'",
            code=2004,
        ) from error
    return _path_of(override, text), _value_of(override, text)


def _path_of(override: Override, text: str) -> str:
    path = override.key_or_group
    if override.package is not None or "/" in path:
        raise ConfigError(f"'{text}' selects a group: set the key itself, as block.key=value", code=2003)
    if not all(path.split(".")):
        raise ConfigError(f"'{text}': '{path}' is not a key path such as sampling.height", code=2003)
    return path


def _value_of(override: Override, text: str) -> Any:
    if override.is_delete():
        return DELETED
    if override.is_sweep_override():
        raise ConfigError(f"'{text}' gives several values: one run takes one; a list is written [1,2]", code=2004)
    return _plain(override.value())


def _plain(value: Any) -> Any:
    """A parsed value with quotes taken off, all the way down."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _check_deletable(path: str, current: Tree, text: str) -> None:
    missing = object()
    if get(current, path, missing) is missing:
        known = [key for key, _ in _all_paths(current)]
        raise ConfigError(f"'{text}': the recipe does not write '{path}'.{did_you_mean(path, known)}", code=2003)


def _check_settable(path: str, value: Any, current: Tree) -> None:
    """A block is not replaced by a scalar, nor a list by one of its items."""
    fold((Layer("", current), Layer("", _nest(path, value))))
    node = get(current, path)
    if isinstance(node, dict) and node and not isinstance(value, dict) and value is not None:
        keys = [key for key in node if key != "_target_"] or ["_target_"]
        first = "path" if "path" in keys else keys[0]
        raise ConfigError(
            f"{path}={value} would replace the block '{path}' (keys {', '.join(keys)}) by a single value. "
            f"Set one of its keys: {path}.{first}={value}",
            code=2005,
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


# Interpolation

_RESOLVER = re.compile(r"\$\{\s*([^}{$:\s]+)\s*:")


def resolve(tree: Tree, where: Any = lambda path: "") -> Tree:
    """The tree with `${key}` and `${oc.env:NAME,default}` replaced; no other resolver exists for a recipe.

    Raises:
        ConfigError: 2003 for another resolver, an unknown key or a variable that is not set.
    """
    for path, value in leaves(tree):
        for name in _RESOLVER.findall(str(value)):
            if name != "oc.env":
                message = f"{path}={value}: '{name}:' is not allowed. Use ${{key}} or ${{oc.env:NAME,default}}"
                raise ConfigError(message + where(path), code=2003)
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        path = str(error.full_key or "")
        raise ConfigError(f"{path}: {_one_line(error)}{where(path)}", code=2003) from error


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
