"""Composes a recipe from its YAML file, the recipe that it extends, environment variables and the command line.

Overrides use Hydra's grammar, without `@hydra.main` and `instantiate`. Any key may be set here; `build.check_node`
checks the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirl.config.errors import ConfigError, InvalidValueError, did_you_mean
from unirl.config.merge import Layer, Origin, Tree, fold, get, join, leaves, origins, put
from unirl.config.overrides import command_line_layer
from unirl.config.recipe_files import RecipeFile, find_recipe, search_path

ENVIRONMENT: Mapping[str, str] = {
    "PRETRAINED_MODEL": "bundle.path",
    "DATA_PATH": "data_source.data_path",
    "EVAL_DATA_PATH": "evaluation.data_path",
    "OUTPUT_DIR": "run.dir",
    "WANDB_PROJECT": "run.project",
    "WANDB_RUN_NAME": "run.name",
    "WANDB_ENTITY": "tracking.entity",
}
"""Environment variables that set a key of any recipe: paths, and the identity of the run."""

_RESOLVER = re.compile(r"\$\{\s*([^}{$:\s]+)\s*:")


@dataclass(frozen=True)
class ComposedConfig:
    """A recipe as a stack of layers, one per source of settings. Nothing is checked yet."""

    recipe: RecipeFile
    layers: tuple[Layer, ...]

    @property
    def tree(self) -> Tree:
        """The merged layers, with interpolations as written."""
        return fold(self.layers)

    def resolved(self) -> Tree:
        """The merged layers, with `${...}` replaced."""
        return resolve(self.tree, self.where)

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line, as typed."""
        return list(self.layers[-1].places.values())

    def why(self, path: str) -> list[Origin]:
        """Every layer that sets a key, the one in effect first. Empty if the key has its default."""
        return [_through_environment(origin) for origin in origins(self.layers, path)]

    def where(self, path: str) -> str:
        """` (sd3_trainside.yaml:12)` or ` (command line: batch_size=4)`; "" if no layer sets the key."""
        for origin in self.why(path)[:1]:
            place = f"{origin.source}: {origin.place}" if origin.source != "recipe" else origin.place
            return f" ({place})" if origin.place else f" ({origin.source})"
        return ""

    def under_command_line(self, layer: Layer) -> ComposedConfig:
        """This recipe with one more layer, just below the command line."""
        return replace(self, layers=(*self.layers[:-1], layer, self.layers[-1]))

    def text(self, resolve_all: bool = False) -> str:
        """YAML as Hydra's `--cfg job [--resolve]` prints it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.resolved() if resolve_all else self.tree))


def compose(recipe: str, overrides: Sequence[str] = (), search: tuple[Path, ...] | None = None) -> ComposedConfig:
    """The recipe called `recipe`, or the YAML file at that path, with `overrides` and the environment variables.

    Raises:
        UsageError: 2001 for an unknown recipe.
        ConfigError: 2003 to 2005 for YAML or overrides that cannot be read.
    """
    file = find_recipe(recipe, search)
    files = _file_layers(file.path)
    environment = _environment_layer(fold(files))
    below = (*files, environment)
    return ComposedConfig(file, (*below, command_line_layer(overrides, fold(below))))


# Files


def _file_layers(path: Path) -> tuple[Layer, ...]:
    """The recipe's layer, above that of the recipe that it extends, if any."""
    tree = _read(path)
    base = _base_of(tree.pop("defaults", None), path)
    layer = Layer("recipe", tree, _places(path))
    if base is None:
        return (layer,)
    below = _read(base)
    if "defaults" in below:
        raise ConfigError(f"{path.name} extends {base.name}, which extends another recipe. Extend a whole recipe")
    return (Layer("recipe", below, _places(base)), layer)


def _base_of(defaults: Any, path: Path) -> Path | None:
    if defaults is None or defaults == ["_self_"]:
        return None
    is_form = isinstance(defaults, list) and len(defaults) == 2 and defaults[1] == "_self_"
    if not is_form or not isinstance(defaults[0], str) or not defaults[0].isidentifier():
        raise InvalidValueError(f"{path.name}: defaults={defaults} must be [<one recipe of the same domain>, _self_]")
    folders = (path.parent, *(folder / path.parent.name for folder in search_path()))
    for folder in folders:
        base = folder / f"{defaults[0]}.yaml"
        if base.is_file() and base != path:
            return base
    names = [file.stem for folder in folders for file in folder.glob("*.yaml") if file != path]
    raise ConfigError(
        f"{path.name} extends '{defaults[0]}': there is no {defaults[0]}.yaml beside it or in examples/"
        f"{path.parent.name}.{did_you_mean(defaults[0], names)}"
    )


def _read(path: Path) -> Tree:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise InvalidValueError(f"{path}: not readable as YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise InvalidValueError(f"{path}: a recipe is a mapping of blocks, got {type(tree).__name__}")
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


def _through_environment(origin: Origin) -> Origin:
    """The origin of a value; it is the environment for a recipe's `${oc.env:NAME,...}` if NAME is set."""
    names = [name for name in re.findall(r"\$\{oc\.env:\s*(\w+)", str(origin.value)) if name in os.environ]
    if not names:
        return origin
    return replace(
        origin, source="environment", place=f"{names[0]}, read at {origin.place}", value=os.environ[names[0]]
    )


def _environment_layer(recipe: Tree) -> Layer:
    """The variables that are set, without those that the recipe reads itself."""
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


# Interpolation


def resolve(tree: Tree, where: Callable[[str], str] = lambda path: "") -> Tree:
    """The tree with `${key}` and `${oc.env:NAME,default}` replaced.

    Raises:
        ConfigError: 2003 for another resolver, an unknown key or a variable that is not set.
    """
    for path, value in leaves(tree):
        for name in _RESOLVER.findall(str(value)):
            if name != "oc.env":
                message = f"{path}={value}: '{name}:' is not allowed. Use ${{key}} or ${{oc.env:NAME,default}}"
                raise ConfigError(message + where(path))
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        path = str(error.full_key or "")
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: {reason}{where(path)}. A reference names a key that the recipe itself writes, or oc.env"
        ) from error


def one_line(error: Exception) -> str:
    """A library's message without its line breaks, cut to a readable length."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
