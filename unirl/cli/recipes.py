"""`unirl recipes ls|search|show`: the recipes that can be trained, and the evidence for each."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from unirl.cli.arguments import Parser, run_verb
from unirl.config.compose import compose
from unirl.config.errors import ConfigError, UsageError
from unirl.config.failures import Session
from unirl.config.merge import get
from unirl.config.recipe_files import RecipeFile, find_recipe, list_recipes

EXAMPLES = ("unirl recipes", "unirl recipes search grpo --json", "unirl recipes show diffusion/sd3_trainside")
WIDTH = 100
"""Characters of a line of the table, unless the terminal is narrower."""
COLUMNS, NARROW_COLUMNS = (33, 15, 10, 16, 4), (33, 11, 10, 12, 4)
"""Characters of every column but the last, one blank included."""


def run(argv: list[str], session: Session) -> int:
    return run_verb("recipes", argv, {"ls": list_all, "search": search, "show": show}, EXAMPLES)


def list_all(argv: Sequence[str]) -> int:
    parser = Parser("recipes ls", "List the recipes with model, algorithm, reward, devices and evidence.", EXAMPLES)
    parser.option("--json", action="store_true", help="as JSON")
    return _print_listing(list_recipes(), parser.parse(argv).json)


def search(argv: Sequence[str]) -> int:
    parser = Parser("recipes search", "List the recipes whose name, text or card contains all words.", EXAMPLES)
    parser.add_argument("words", nargs="+", metavar="TEXT")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    words = [word.lower() for word in options.words]
    matches = [recipe for recipe in list_recipes() if all(word in _searchable(recipe) for word in words)]
    if not matches and not options.json:
        raise UsageError(f"no recipe mentions {' and '.join(options.words)}. All: unirl recipes")
    return _print_listing(matches, options.json)


def show(argv: Sequence[str]) -> int:
    parser = Parser("recipes show", "Print a recipe and its card.", EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE")
    recipe = find_recipe(parser.parse(argv).recipe)
    for name, value in (asdict(_summary(recipe)) | asdict(recipe.card)).items():
        print(f"# {name}: {value}")
    print(f"# file: {recipe.path}\n\n{recipe.path.read_text(encoding='utf-8').rstrip()}")
    return 0


@dataclass(frozen=True)
class Summary:
    """The cells of a recipe in the table."""

    model: str = "?"
    algorithm: str = "?"
    scorer: str = "?"
    devices: str = "?"
    evidence: str = ""


def _summary(recipe: RecipeFile) -> Summary:
    """Read from the composed YAML alone, so that no model code is imported."""
    try:
        tree = compose(str(recipe.path)).tree
    except ConfigError as error:
        return Summary(evidence=f"unreadable: {error}")
    return Summary(
        model=_class_of(tree.get("bundle"), "Bundle"),
        algorithm=_class_of(tree.get("algorithm")).removeprefix("Diffusion"),
        scorer=_scorer_of(get(tree, "reward.backend", get(tree, "reward"))),
        devices=str(tree.get("num_devices", 1)),
        evidence=recipe.card.evidence,
    )


def _class_of(block: object, *suffixes: str) -> str:
    """The class that a block names, without its module and the given suffix."""
    name = str(block.get("_target_", "?") if isinstance(block, dict) else "?").rpartition(".")[2]
    for suffix in suffixes:
        name = name.removesuffix(suffix)
    return name


def _scorer_of(block: object) -> str:
    """The scorer, or the first scorer of a weighted sum and the number of the others."""
    if isinstance(block, dict) and isinstance(block.get("scorers"), dict) and block["scorers"]:
        first, *others = block["scorers"].values()
        return f"{_scorer_of(first)} + {len(others)}" if others else _scorer_of(first)
    return _class_of(block, "RewardScorer", "RewardBackend")


def _print_listing(recipes: Sequence[RecipeFile], as_json: bool) -> int:
    rows = [(recipe, _summary(recipe)) for recipe in recipes]
    if as_json:
        facts = [
            {"name": recipe.name, "path": str(recipe.path), **asdict(recipe.card), **asdict(summary)}
            for recipe, summary in rows
        ]
        print(json.dumps(facts, indent=1))
        return 0
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    print(_line(("RECIPE", "MODEL", "ALGORITHM", "REWARD", "DEV", "EVIDENCE"), width))
    for domain, members in groupby(rows, key=lambda row: row[0].name.rpartition("/")[0]):
        print(f"{domain}/")
        for recipe, summary in members:
            print(_line((f" {recipe.name.rpartition('/')[2]}", *asdict(summary).values()), width))
    print("\nDEV: devices. toy: ran end to end at scale=toy. trained: the mean reward rose on held-out prompts.")
    print("Details: unirl recipes show DOMAIN/RECIPE")
    return 0


def _line(cells: Sequence[str], width: int) -> str:
    """One row. A long name gets a line of its own, and so does long evidence on a narrow terminal."""
    columns = COLUMNS if width >= WIDTH else NARROW_COLUMNS
    name, *middle, evidence = cells
    head = f"{name:<{columns[0]}}" if len(name) < columns[0] else f"{name}\n{'':{columns[0]}}"
    head += "".join(f"{_cut(cell, size - 1):<{size}}" for cell, size in zip(middle, columns[1:], strict=True))
    room = width - sum(columns)
    if width >= WIDTH or len(evidence) <= room:
        return head + f"\n{'':{sum(columns)}}".join(textwrap.wrap(evidence, room) or [""])
    return f"{head.rstrip()}\n{textwrap.indent(textwrap.fill(evidence, width - 4), '    ')}"


def _cut(cell: str, size: int) -> str:
    return cell if len(cell) <= size else f"{cell[: size - 2]}.."


def _searchable(recipe: RecipeFile) -> str:
    card = " ".join(asdict(recipe.card).values())
    return f"{recipe.name} {card} {recipe.path.read_text(encoding='utf-8')}".lower()
