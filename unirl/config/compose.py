"""Composes a recipe from its YAML file, the recipes that it extends, environment variables and the command line.

Overrides use Hydra's grammar, without `@hydra.main` and `instantiate`. Any key may be set here; `build.check_node`
checks the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unirl.config.errors import ConfigError, InvalidValueError
from unirl.config.merge import ConfigLayer, Origin, Tree, fold, get, join, leaves, origins, put
from unirl.config.overrides import command_line_layer, option, options_of
from unirl.config.recipe_files import RecipeFile, find_base, find_recipe

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

VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*(\w+)")
"""The environment variable that the text of a value reads."""
_RESOLVER = re.compile(r"\$\{\s*([^}{$:\s]+)\s*:")
_REFERENCE = re.compile(r"\$\{(?!\s*oc\.env\s*:)")
_NESTED = re.compile(r"\$\{(?!\s*oc\.env:\s*\w+\s*,)[^}]*\$\{")
"""A reference inside the name of another one. The default of `${oc.env:NAME,...}` may be a reference."""
_SAME = object()
MAX_VALUES = 100_000
"""Values of a recipe file, each alias counted with all that it repeats. The largest recipe that ships has about 100."""
MAX_DEPTH = 100


@dataclass(frozen=True)
class ComposedConfig:
    """A recipe as a stack of layers, one per source of settings. Nothing is checked yet."""

    recipe: RecipeFile
    layers: tuple[ConfigLayer, ...]

    @property
    def tree(self) -> Tree:
        """The merged layers, with interpolations as written."""
        return fold(self.layers)

    @cached_property
    def _folded(self) -> Tree:
        """`tree`, which nobody changes."""
        return self.tree

    def resolved(self) -> Tree:
        """The merged layers, with `${...}` replaced."""
        return resolve(self.tree, self.where)

    def variable_of(self, key: str) -> str | None:
        """The environment variable that sets a key: the one that the recipe reads, or one of every recipe.

        None if there is none, and if the command line sets the key, which counts more.
        """
        if key in self.layers[-1].places:
            return None
        own = VARIABLE.findall(str(get(self.tree, key)))
        of_every_recipe = {path: name for name, path in ENVIRONMENT.items()}
        return own[0] if own else of_every_recipe.get(key.removeprefix("diffusion."))

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line, as typed. One may set several keys, such as rollout=sglang."""
        return list(dict.fromkeys(self.layers[-1].places.values()))

    def why(self, path: str) -> list[Origin]:
        """Every layer that sets a key, the one in effect first. Empty if the key has its default."""
        return [_through_environment(origin) for origin in origins(self.layers, self._folded, path)]

    def where(self, path: str) -> str:
        """` (sd3_trainside.yaml:12)` or ` (command line: batch_size=4)`; "" if no layer sets the key."""
        for origin in self.why(path)[:1]:
            place = f"{origin.source}: {origin.place}" if origin.source != "recipe" else origin.place
            return f" ({place})" if origin.place else f" ({origin.source})"
        return ""

    def under_command_line(self, layer: ConfigLayer) -> ComposedConfig:
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


def _file_layers(path: Path, above: tuple[Path, ...] = ()) -> tuple[ConfigLayer, ...]:
    """The layers of a recipe and of the recipes that it extends, the recipe's own last.

    Args:
        above: the recipes that extend this one.
    """
    if path in above:
        chain = " -> ".join(file.name for file in (*above[above.index(path) :], path))
        raise ConfigError(f"{path} extends itself ({chain}). Remove one of these `defaults`")
    layer = read_file(path)
    name, options = _defaults(layer.tree.pop("defaults", None), path)
    below = () if name is None else _file_layers(find_base(name, path), (*above, path))
    return (*below, *options, layer)


def _defaults(defaults: object, path: Path) -> tuple[str | None, tuple[ConfigLayer, ...]]:
    """The recipe that `defaults` names (None if there is none), and the layers of the options that it chooses."""
    match defaults:
        case None:
            return None, ()
        case [str(name), *chosen, "_self_"] if name != "_self_":
            return name, tuple(_option_layer(each, defaults, path) for each in chosen)
        case [*chosen, "_self_"] | [*chosen]:
            return None, tuple(_option_layer(each, defaults, path) for each in chosen)
    raise _bad_defaults(defaults, path)


def _option_layer(chosen: object, defaults: object, path: Path) -> ConfigLayer:
    """The blocks of an entry such as `transfer_queue: simple`."""
    match chosen:
        case {**entry} if len(entry) == 1:
            ((block, name),) = entry.items()
            blocks = option(str(block), name)
            if blocks:
                return ConfigLayer("option", blocks, dict.fromkeys(blocks, f"{block}: {name} of {path.name}"))
            if names := options_of(str(block)):
                raise InvalidValueError(f"{path.name}: defaults: {block}: {name} must be one of {', '.join(names)}")
    raise _bad_defaults(defaults, path)


def _bad_defaults(defaults: object, path: Path) -> InvalidValueError:
    return InvalidValueError(
        f"{path.name}: defaults={defaults} must be [<one recipe>, _self_], such as [diffusion/sd3_trainside, _self_]. "
        "Options such as `transfer_queue: simple` may stand before _self_"
    )


def read_file(path: Path) -> ConfigLayer:
    """The settings of a file, and the line of every key."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        _refuse_large(root, path)
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
        raise InvalidValueError(f"{path}: not readable as YAML: {reason}") from error
    if not isinstance(tree, dict):
        raise InvalidValueError(f"{path}: a recipe is a mapping of blocks, got {type(tree).__name__}")
    places = {key: f"{path.name}:{line}" for key, line in _lines(root, "")}
    return ConfigLayer("recipe", {str(key): value for key, value in tree.items()}, places)


def _refuse_large(root: yaml.Node | None, path: Path) -> None:
    """Refuses (2004) a file with more values than a recipe can need, before they are made.

    An alias (`*name`) repeats all of what it names, so a few lines can stand for billions of values.
    """
    if root is not None and _num_values(root, {}, ()) > MAX_VALUES:
        raise InvalidValueError(
            f"{path}: with its aliases (*name) the file has more than {MAX_VALUES} values, or an alias contains "
            "itself. Write what a recipe needs without aliases"
        )


def _num_values(node: yaml.Node, counted: dict[int, int], above: tuple[int, ...]) -> int:
    """The number of values of a node with all aliases replaced. An alias that contains itself counts as too many."""
    if id(node) in above or len(above) > MAX_DEPTH:
        return MAX_VALUES + 1
    if id(node) not in counted:
        below = node.value if isinstance(node, yaml.SequenceNode) else ()
        below = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else below
        counted[id(node)] = 1 + sum(_num_values(each, counted, (*above, id(node))) for each in below)
    return counted[id(node)]


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


def _environment_layer(recipe: Tree) -> ConfigLayer:
    """The variables that are set, without those that the recipe reads itself."""
    tree: Tree = {}
    places: dict[str, str] = {}
    for name, path in ENVIRONMENT.items():
        value = os.environ.get(name, "")
        if path == "bundle.path" and path.partition(".")[0] not in recipe:
            path = f"diffusion.{path}"  # in a recipe of several policies, the model whose samples are scored
        block = path.partition(".")[0]
        has_block = block in recipe or block in ("run", "evaluation", "tracking")
        if value and has_block and f"oc.env:{name}" not in str(get(recipe, path)):
            put(tree, path, value)
            places[path] = name
    return ConfigLayer("environment", tree, places)


# Interpolation


def resolve(tree: Tree, where: Callable[[str], str] = lambda path: "") -> Tree:
    """The tree with `${key}` and `${oc.env:NAME,default}` replaced.

    Raises:
        ConfigError: 2003 for another resolver, an unknown key or a variable that is not set.
    """
    values = [(path, str(value)) for path, value in leaves(tree)]
    for path, value in values:
        if _NESTED.search(value):
            raise ConfigError(
                f"{path}={value}: a reference inside the name of another one is not allowed, because nobody can see "
                f"what it reads. Name the key itself{where(path)}"
            )
        for name in _RESOLVER.findall(value):
            if name != "oc.env":
                message = f"{path}={value}: '{name}:' is not allowed. Use ${{key}} or ${{oc.env:NAME,default}}"
                raise ConfigError(message + where(path))
    # OmegaConf takes longer than all other checks: it gets what has a `${`, or all if some of that names another key.
    part = tree if any(_REFERENCE.search(value) for _, value in values) else _interpolated(tree)
    try:
        return _over(tree, OmegaConf.to_container(OmegaConf.create(part), resolve=True))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        path = str(error.full_key or "")
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path}: {reason}{where(path)}. A reference names a key that the recipe itself writes, or oc.env"
        ) from error


def _interpolated(tree: Tree) -> Tree:
    """The blocks and values of the tree that have a `${`."""
    kept = {key: value for key, value in tree.items() if "${" in str(value)}
    return {key: _interpolated(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _over(value: object, resolved: object = _SAME) -> object:
    """A copy of a value, with the parts that were resolved in their places."""
    if isinstance(value, dict) and (resolved is _SAME or isinstance(resolved, dict)):
        below = resolved if isinstance(resolved, dict) else {}
        return {key: _over(item, below.get(key, _SAME)) for key, item in value.items()}
    if resolved is not _SAME:
        return resolved
    return [_over(item) for item in value] if isinstance(value, (list, tuple)) else value
