"""Finds recipes, by a `<domain>/<recipe>` name under examples/ or by the path of a YAML file, and reads their cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from unirl.config.errors import ConfigError, UsageError, did_you_mean, likeness, nearest

PACKAGE = Path(__file__).resolve().parents[1]

CARD_SUFFIX = ".card.yaml"
SUFFIXES = (".yaml", ".yml")

LIKELY = 0.6
"""Smallest similarity at which a file is suggested for one that does not exist."""

DOMAIN_OF = {
    "diffusion": "diffusion",
    "vlm": "vlm",
    "llm": "vlm",
    "pe": "pe",
    "unified_model": "unified_model",
    "embodied": "embodied",
}
"""Folder of recipes to the domain whose entrypoint, `python -m unirl.train_<domain>`, trains them."""

DRPO_SGLANG = "qwen3_ar_drpo_4b_base_dapo_sglang", "qwen3_ar_drpo_4b_base_dpao_sglang"
"""The name by the data set, DAPO, and the published name, which this recipe has here."""
ACTING = {"embodied", "maniskill", "libero", "metaworld", "robotwin", "calvin", "isaaclab", "behavior", "robocasa"}
"""Words in names of RLinf's scripts and configurations for policies that act."""
SAME_RECIPE = {one: f"llm/{other}" for one, other in (DRPO_SGLANG, DRPO_SGLANG[::-1])}
"""Another name of a recipe to the recipe."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The evidence for a recipe, written by scripts/toy_cards.py from a run. "none" stands for an absent value."""

    status: str = "untested"
    """untested | toy (runs end to end at scale=toy) | trained (the reward rose at full size)."""
    hardware: str = "none"
    date: str = "none"
    commit: str = "none"
    updates: str = "none"
    """Optimizer updates of the run."""
    skipped_updates: str = "none"
    gradient_norm: str = "none"
    """Gradient norm of the last update of each step. Values of several steps are separated by commas."""
    reward: str = "none"
    """Mean of each step; of a trained recipe, the held-out mean before and after training, for each seed."""
    reward_std: str = "none"
    ratio: str = "none"
    """Mean importance ratio."""
    result: str = "none"
    """A sentence about the run."""

    @property
    def evidence(self) -> str:
        """Status, reward of a trained recipe, and remarks, in a few words for a table."""
        gain = f" {self.reward.partition(' (')[0]}" if self.status == "trained" else ""
        return ", ".join([self.status + gain, *self.remarks])

    @property
    def remarks(self) -> tuple[str, ...]:
        """Facts that weaken the evidence: a gradient norm of 0, constant rewards, skipped updates."""
        conditions = {
            "gradient norm 0": _all_zero(self.gradient_norm),
            "constant rewards": _all_zero(self.reward_std),
            f"{self.skipped_updates} skipped updates": self.skipped_updates not in ("none", "0"),
        }
        return tuple(remark for remark, holds in conditions.items() if holds)


def _all_zero(values: str) -> bool:
    """True if a field of a card holds numbers and all of them are 0, in a run of several policies those of any one.

    The numbers of several policies are written as `ar 0.1, 0.2; diffusion 0, 0`.
    """
    policies = [[value.rpartition(" ")[2] for value in policy.split(", ")] for policy in values.split("; ")]
    return any(all(value != "none" and float(value) == 0.0 for value in policy) for policy in policies)


@dataclass(frozen=True)
class RecipeFile:
    """A recipe by name, and the file that holds it."""

    name: str  # "diffusion/sd3_trainside"
    path: Path
    is_listed: bool = True
    """True if `unirl recipes` lists it, so that its name is enough to find it."""

    @property
    def argument(self) -> str:
        """What a command takes to find this recipe: its name, or the path of its file."""
        return self.name if self.is_listed else str(self.path)

    @property
    def card(self) -> Card:
        """The card beside the recipe. A recipe without one is untested."""
        path = self.path.with_suffix(CARD_SUFFIX)
        if not path.is_file():
            return Card()
        fields = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Card(**{key: " ".join(str(value).split()) for key, value in fields.items()})


def search_path() -> tuple[Path, ...]:
    """The examples/ folders of the checkout, of the installed package and of the working directory."""
    folders = (PACKAGE.parent / "examples", PACKAGE / "examples", Path.cwd() / "examples")
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def list_recipes(search: tuple[Path, ...] | None = None) -> list[RecipeFile]:
    """All recipes of the search path, sorted by name. If two folders have a name, the first folder wins."""
    recipes: dict[str, RecipeFile] = {}
    for folder in search_path() if search is None else search:
        for path in sorted(folder.glob("*/**/*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if not path.name.endswith(CARD_SUFFIX):
                recipes.setdefault(name, RecipeFile(name, path))
    return sorted(recipes.values(), key=lambda recipe: recipe.name)


def find_recipe(name: str, search: tuple[Path, ...] | None = None) -> RecipeFile:
    """The recipe called `name`, or the YAML file at that path.

    Raises:
        UsageError: 2001 with the three nearest names.
    """
    known = {recipe.name: recipe for recipe in list_recipes(search)}
    wanted = name.removesuffix(".yaml").removeprefix("examples/")
    if wanted in known:
        return known[wanted]
    path = Path(name).expanduser()
    if path.suffix in SUFFIXES and path.is_file():
        return _recipe_at(path)
    if path.suffix in SUFFIXES or name.startswith((".", "/", "~")) or path.with_suffix(".yaml").is_file():
        raise UsageError(f"{_no_file(path)} Recipes that ship: unirl recipes")
    if not known:
        raise UsageError(f"no recipe '{name}': no examples/ folder was found. Give a path to a YAML file")
    same = SAME_RECIPE.get(wanted.rpartition("/")[2])
    same_file = [full for full in known if full.rpartition("/")[2] == name or full == same]
    close = list(dict.fromkeys([*same_file, *_of_policies(wanted, known), *nearest(name, known)]))[:3]
    raise UsageError(
        f"no recipe '{name}', neither under examples/ nor as a YAML file. "
        f"Nearest: {', '.join(close)}. All: unirl recipes"
    )


def _of_policies(name: str, known: Iterable[str]) -> list[str]:
    """For a name like those of RLinf, the recipes of policies that act which share most words with it."""
    words = {*re.split(r"[/_.]", name)}
    if not words & ACTING:
        return []
    of_policies = [recipe for recipe in known if recipe.startswith("embodied/")]
    return sorted(of_policies, key=lambda recipe: -len(words & {*re.split("[/_]", recipe)}))


def find_base(name: str, extended_by: Path) -> Path:
    """The file of the recipe `name`, which the recipe at `extended_by` extends.

    Args:
        name: `sd3_trainside`, looked up in the recipe's own folder, in the folder of examples/ with the same name, and
            then in all of examples/; or `diffusion/sd3_trainside`; or a path that ends in .yaml, relative to the
            recipe's folder.

    Raises:
        ConfigError: 2003 when there is no such recipe, or several.
    """
    who = f"{extended_by.name} extends '{name}', but"
    own = extended_by.resolve().parent
    if Path(name).suffix in SUFFIXES:
        path = (own / Path(name).expanduser()).resolve()
        if path.is_file():
            return path
        raise ConfigError(f"{who} {_no_file(path)}")
    folders = (own, *(folder / own.name for folder in search_path()))
    files = [file for folder in folders for file in sorted(folder.glob("*.yaml")) if file != extended_by.resolve()]
    listed = [recipe for recipe in list_recipes() if recipe.path != extended_by.resolve()]
    same_folder = [file for file in files if file.stem == name]
    matches = [recipe for recipe in listed if name in (recipe.name, recipe.path.stem)]
    if same_folder or len(matches) == 1:
        return same_folder[0] if same_folder else matches[0].path
    if matches:
        raise ConfigError(f"{who} there are several. Write one of {', '.join(recipe.name for recipe in matches)}")
    choices = [recipe.name for recipe in listed] if "/" in name else [file.stem for file in (*files, *_paths(listed))]
    raise ConfigError(
        f"{who} there is no such recipe in {own} or in examples/.{did_you_mean(name, choices)} All: unirl recipes"
    )


def _recipe_at(path: Path) -> RecipeFile:
    path = path.resolve()
    return RecipeFile(f"{path.parent.name}/{path.stem}", path, is_listed=False)


def _paths(recipes: Sequence[RecipeFile]) -> list[Path]:
    return [recipe.path for recipe in recipes]


def _no_file(path: Path) -> str:
    """What is wrong with the path of a recipe, as a sentence."""
    if path.is_file():
        return f"{path} is not a recipe: the file of a recipe ends in .yaml."
    if path.is_dir():
        return f"{path} is a folder: name a YAML file in it."
    here = {file.stem: file for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}")}
    likely = [here[stem] for stem in nearest(path.stem, here, 1) if likeness(path.stem, stem) >= LIKELY]
    return f"there is no file {path}." + "".join(f" Did you mean '{file}'?" for file in likely)
