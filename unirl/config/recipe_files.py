"""Finds recipes, by a `<domain>/<recipe>` name under examples/ or by the path of a YAML file, and reads their cards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from unirl.config.errors import UsageError, nearest

PACKAGE = Path(__file__).resolve().parents[1]

CARD_SUFFIX = ".card.yaml"

DOMAIN_OF = {"diffusion": "diffusion", "vlm": "vlm", "llm": "vlm"}
"""Folder of recipes to the domain whose entrypoint, `python -m unirl.train_<domain>`, trains them."""

SAME_RECIPE = {"qwen3_ar_drpo_4b_base_dpao_sglang": "llm/qwen3_ar_drpo_4b_base_dapo"}
"""Recipe name of the reference system to the recipe that does the same here."""


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
    """True if a field of a card holds numbers and all of them are 0."""
    return values != "none" and all(value != "none" and float(value) == 0.0 for value in values.split(", "))


@dataclass(frozen=True)
class RecipeFile:
    """A recipe by name, and the file that holds it."""

    name: str  # "diffusion/sd3_trainside"
    path: Path

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
    if path.suffix in (".yaml", ".yml") and path.is_file():
        path = path.resolve()
        return RecipeFile(f"{path.parent.name}/{path.stem}", path)
    if not known:
        raise UsageError(f"no recipe '{name}': no examples/ folder was found. Give a path to a YAML file")
    same = SAME_RECIPE.get(wanted.rpartition("/")[2])
    same_file = [full for full in known if full.rpartition("/")[2] == name or full == same]
    close = list(dict.fromkeys([*same_file, *nearest(name, known)]))[:3]
    raise UsageError(
        f"no recipe '{name}', neither under examples/ nor as a YAML file. "
        f"Nearest: {', '.join(close)}. All: unirl recipes"
    )
