"""Loads a recipe by its name: compose, apply scale=toy, resolve interpolations, check. No model is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from unirl.config.build import SPECIAL, build, check_node, schemas_of
from unirl.config.compose import VARIABLE, ComposedConfig, compose
from unirl.config.errors import ConfigError, InvalidValueError, UnknownKeyError, did_you_mean, likeness, nearest
from unirl.config.foreign_keys import refuse_environment_types, refuse_layout_keys
from unirl.config.foreign_placement import refuse_foreign_placement
from unirl.config.merge import ConfigLayer, Tree, get, join, leaves, put
from unirl.config.node import Node
from unirl.config.recipe import (
    OF_TRACK,
    POLICY_BLOCKS,
    AnyConfig,
    EnhancerConfig,
    RecipeConfig,
    UnifiedConfig,
    policy_keys,
    recipe_class,
)
from unirl.config.recipe_files import RecipeFile, search_path
from unirl.config.schema import Schema, schema_of
from unirl.config.secrets import public, reference, secret_keys, secret_values
from unirl.config.targets import check_plugins, find_target
from unirl.config.toy import toy_layer
from unirl.config.tracks import check_track_names
from unirl.config.trust import trusted
from unirl.config.values import ReadContext, read
from unirl.types.credit import CreditName
from unirl.types.secrets import conceal

ELSEWHERE = 0.8
"""Smallest similarity at which a key of another block is suggested for an unknown key."""


@dataclass(frozen=True)
class Recipe:
    """A recipe whose keys, types and ranges are checked."""

    composed: ComposedConfig
    root: Node
    policies: Mapping[str, RecipeConfig]
    """The recipe as each of its tracks sees it, from the first track to the last; "" is the only one of a recipe.

    Each track continues the one before it. The last one is scored.
    """
    engine: Node | None = None
    """The engine that composes those of several policies. None if one engine samples everything."""
    credit: CreditName = "mean"
    """The rule of credit between a parent track and its children."""
    trained: tuple[str, ...] = ("",)
    """The tracks whose losses are trained."""
    shares_weights: bool = False
    """One network samples all tracks."""

    @property
    def config(self) -> RecipeConfig:
        """The recipe as its first policy sees it. The settings of the run are those of every policy."""
        return next(iter(self.policies.values()))

    @property
    def parents(self) -> Mapping[str, str]:
        """Track to the track that it continues."""
        return dict(zip(list(self.policies)[1:], self.policies, strict=False))

    @property
    def weights(self) -> Mapping[str, tuple[str, ...]]:
        """The tracks of each set of weights, by the name of its policy; the only policy of a run has the name ""."""
        return {"": tuple(self.policies)} if self.shares_weights else {name: (name,) for name in self.policies}

    @property
    def file(self) -> RecipeFile:
        """Its name, path and card."""
        return self.composed.recipe

    def model_variable(self, policy: str) -> str | None:
        """The environment variable that sets the model of a policy. None if there is none."""
        return self.composed.variable_of(f"{self.policies[policy].bundle.path}.path")

    def alone(self, policy: str) -> Recipe:
        """The recipe as if it had only this policy."""
        return replace(self, policies={"": self.policies[policy]}, engine=None, trained=("",), shares_weights=False)

    def resolved(self) -> Tree:
        """Every key, with defaults filled in."""
        return self.root.resolved()

    def public(self) -> Tree:
        """Every key, with defaults filled in, as it may be written: secrets are variables, or masked."""
        return cast(Tree, public(self.resolved(), self.composed.tree, secret_keys(self.root)))

    def resolved_text(self) -> str:
        """The content of config/resolved.yaml."""
        return OmegaConf.to_yaml(OmegaConf.create(self.public()))

    def written_text(self) -> str:
        """The content of config/recipe.yaml: the keys that the recipe and its overrides write."""
        tree = public(self.composed.resolved(), self.composed.tree, secret_keys(self.root))
        return OmegaConf.to_yaml(OmegaConf.create(cast(Tree, tree)))

    def origins(self) -> dict[str, dict[str, str]]:
        """The content of config/origins.json: key to the `source` and `place` of its value. Defaults are left out.

        What was typed on the command line is not repeated as a place, since it may contain a secret.
        """
        found = {}
        for key, _ in leaves(self.resolved()):
            for origin in self.composed.why(key)[:1]:
                shown = origin.place if origin.source in ("recipe", "environment") else ""
                found[key] = {"source": origin.source, "place": shown}
        return found

    def shown_overrides(self) -> list[str]:
        """The settings of the command line, with a variable in place of a secret that was typed."""
        typed = secret_keys(self.root)
        return [reference(setting, typed) for setting in self.composed.overrides]

    def value(self, path: str) -> object:
        """The value of a key, or its default. Raises ConfigError (2003) for a key that does not exist."""
        missing = object()
        value = get(self.resolved(), path, missing)
        if value is missing:
            hint = did_you_mean(path, [key for key, _ in leaves(self.resolved())])
            raise ConfigError(f"{self.file.name} has no key '{path}'.{hint}")
        return value


def load(recipe: str, overrides: Sequence[str] = (), search: tuple[Path, ...] | None = None) -> Recipe:
    """The checked recipe called `recipe`, with `overrides`.

    Raises:
        UsageError, ConfigError: exit status 2; the message names key, value, rule and way out.
    """
    return check(compose(recipe, overrides, search))


def check(composed: ComposedConfig) -> Recipe:
    """Checks a composed recipe against the classes that it names, after applying scale=toy if it says so."""
    tree = composed.resolved()
    for value in secret_values(tree, composed.tree, set()):
        conceal(value)
    plugins = _plugins(composed)
    composed = replace(composed, layers=tuple(_used(layer, tree, plugins) for layer in composed.layers))
    refuse_layout_keys(tree)
    refuse_environment_types(tree)
    refuse_foreign_placement(tree)
    if get(tree, "scale") == "toy":
        typed = composed.layers[-1].tree
        composed = composed.under_command_line(toy_layer(tree, plugins, typed))
    composed = composed.under_command_line(data_layer(composed.resolved(), composed.recipe.path))
    _refuse_empty_variables(composed)
    tree = composed.resolved()
    _refuse_keys_of_no_track(composed, tree, plugins)
    check_track_names(tree, schemas_of(tree, plugins).get("pipeline"), composed.where)
    try:
        root = check_node(tree, recipe_class(tree), plugins=plugins, where=composed.where)
    except UnknownKeyError as error:
        error = _with_policy(error, composed, plugins)
        raise error if error.hinted else _with_hint(error, composed, plugins) from None
    return recipe_of(composed, root, build(root))


def recipe_of(composed: ComposedConfig, root: Node, settings: AnyConfig) -> Recipe:
    """The recipe with the given settings, as its tracks see it."""
    policies = settings.policies
    if isinstance(settings, RecipeConfig):
        return Recipe(composed, root, policies)
    is_enhancer = isinstance(settings, EnhancerConfig)
    engine = settings.rollout if is_enhancer else None
    trained = settings.trained or tuple(policies)
    return Recipe(composed, root, policies, engine, settings.credit, trained, shares_weights=not is_enhancer)


def _refuse_keys_of_no_track(composed: ComposedConfig, tree: Tree, plugins: tuple[str, ...]) -> None:
    """Refuses a key such as `sampling.height` where each track of one network has its own.

    Other names without a block are left to the checks of tracks and blocks.
    """
    for block in OF_TRACK if recipe_class(tree) is UnifiedConfig else ():
        entries = tree.get(block)
        for name in entries if isinstance(entries, dict) else ():
            path = join(block, name)
            is_track = any(isinstance(get(tree, join(other, name)), dict) for other in OF_TRACK)
            if not is_track:
                schemas, keys = schemas_of(tree, plugins), policy_keys(tree, path)
                known = [key for key in keys if _is_key(key, schemas)]
                text = f"unknown key '{path}'{composed.where(path)}: this recipe has several tracks"
                if known:
                    raise UnknownKeyError(f"{text}. Write {' or '.join(known)}", path, hinted=True)


def _refuse_empty_variables(composed: ComposedConfig) -> None:
    """Refuses a key that is read from an environment variable that is set to nothing, by the variable's name."""
    for path, value in leaves(composed.tree):
        for name in VARIABLE.findall(str(value)):
            if os.environ.get(name) == "":
                raise InvalidValueError(
                    f"{path} is read from the environment variable {name}, which is set but empty. Give it a value, or "
                    f"unset it: unset {name}"
                )


def _with_policy(error: UnknownKeyError, composed: ComposedConfig, plugins: tuple[str, ...]) -> UnknownKeyError:
    """The error with the keys to write, for a key of a policy without the policy's name; else the error itself."""
    tree = composed.resolved()
    kind, block = recipe_class(tree), error.path.partition(".")[0]
    if kind is RecipeConfig or block not in (POLICY_BLOCKS if kind is EnhancerConfig else OF_TRACK):
        return error
    schemas = schemas_of(tree, plugins)
    below = get(tree, error.path)
    path = (
        next((join(error.path, key) for key, _ in leaves(below)), error.path) if isinstance(below, dict) else error.path
    )
    keys = [key for key in policy_keys(tree, path) if _is_key(key, schemas)]
    if block in schemas and not keys:  # a mistyped key of a block that stands at the top level as well
        return error
    write = f"Write {' or '.join(keys)}" if keys else f"Its blocks are {' and '.join(policy_keys(tree, block))}"
    number = "two policies" if kind is EnhancerConfig else "several tracks"
    text = f"unknown key '{path}'{composed.where(path)}: this recipe has {number}. {write}"
    return UnknownKeyError(text, error.path, hinted=True)


def _is_key(path: str, schemas: Mapping[str, Schema]) -> bool:
    """True for a key that the nearest known block above it has."""
    parent, _, name = path.rpartition(".")
    return name in schemas[parent].keys if parent in schemas else bool(parent) and _is_key(parent, schemas)


def _with_hint(error: UnknownKeyError, composed: ComposedConfig, plugins: tuple[str, ...]) -> UnknownKeyError:
    """The error with the nearest key of any block, or the error itself if no key is similar."""
    name = error.path.rpartition(".")[2]
    paths: dict[str, str] = {}
    for path, schema in schemas_of(composed.resolved(), plugins).items():
        for key in schema.keys:
            paths.setdefault(key, join(path, key))
    best = nearest(name, paths, 1)[0]
    # A key of another block must look more alike than one of the same block.
    if likeness(name, best) < ELSEWHERE:
        return error
    text = f"unknown key '{error.path}'{composed.where(error.path)}. Did you mean '{paths[best]}'?"
    return UnknownKeyError(text, error.path, hinted=True)


def data_layer(tree: Tree, recipe: Path) -> ConfigLayer:
    """Full paths of data files that are not in the working directory, but in the project of the recipe."""
    own = next((folder.parent for folder in recipe.parents if folder.name == "examples"), recipe.parent)
    # A recipe may extend a shipped one, whose data are in the shipped project.
    projects = (own, *(folder.parent for folder in search_path()))
    paths: Tree = {}
    for key in ("data_source.data_path", "evaluation.data_path"):
        path = get(tree, key)
        if isinstance(path, str) and not Path(path).expanduser().exists():
            files = [project / path for project in projects if (project / path).is_file()]
            if files:
                put(paths, key, str(files[0]))
    return ConfigLayer("found beside the recipe", paths)


def needed_plugins(composed: ComposedConfig) -> tuple[str, ...]:
    """The packages that the files of a recipe name. Naming them does not allow them."""
    return tuple(name for layer in composed.layers[:-1] for name in _plugins_of(layer, composed))


def _plugins(composed: ComposedConfig) -> tuple[str, ...]:
    """The packages that the recipe may use. Nothing of them is imported here."""
    typed, needed = _plugins_of(composed.layers[-1], composed), needed_plugins(composed)
    where = next((layer.place("plugins") for layer in reversed(composed.layers[:-1]) if "plugins" in layer.tree), "")
    allowed = trusted(typed, needed, f" ({where})" if where else "")
    check_plugins(tuple(dict.fromkeys((*typed, *needed))))
    return allowed


def _plugins_of(layer: ConfigLayer, composed: ComposedConfig) -> tuple[str, ...]:
    context = ReadContext("plugins", composed.where, (), lambda value, expected, context: value)
    plugins: tuple[str, ...] = read(layer.tree.get("plugins", []), tuple[str, ...], context)
    return plugins


def _used(layer: ConfigLayer, tree: Tree, plugins: tuple[str, ...]) -> ConfigLayer:
    """The layer without variables for keys that the recipe's classes lack, such as DATA_PATH for built-in prompts."""
    if layer.source != "environment":
        return layer
    used: Tree = {}
    for path, value in leaves(layer.tree):
        parent, _, name = path.rpartition(".")
        target = get(tree, f"{parent}.{SPECIAL}")
        if path and (target is None or name in schema_of(find_target(target, parent, plugins)).keys):
            put(used, path, value)
    return replace(layer, tree=used)
