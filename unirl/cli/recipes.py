"""`unirl recipes ls|search|show`: the recipes that can be trained, what each is for, and the evidence for it."""

import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile

from unirl.cli.arguments import Parser, run_verb
from unirl.config.compose import compose
from unirl.config.errors import ConfigError, UsageError
from unirl.config.failures import Session
from unirl.config.merge import get
from unirl.config.recipe import policy_keys
from unirl.config.recipe_files import RecipeFile, find_recipe, list_recipes
from unirl.tracking.streams import print_inert

EXAMPLES = ("unirl recipes", "unirl recipes search grpo --json", "unirl recipes show diffusion/sd3_trainside")
WIDTH = 100
"""Characters of a line of the table where the terminal does not say how wide it is."""
NAME, OUTCOME = 40, 25
"""Characters of the columns before the date, one blank included."""
PAPER = re.compile(r" \((arXiv:)?\d{4}\.\d{5}\)")
LEGEND = (
    "toy: ran end to end at scale=toy. trained A -> B: mean reward on held-out prompts before and after training; "
    "rewards of different recipes may have different scales."
)
OWN = "Your own recipe extends one of these, in a YAML file anywhere: unirl train ./mine.yaml (docs/extending.md)"


def run(argv: list[str], session: Session) -> int:
    return run_verb("recipes", argv, {"ls": list_all, "search": search, "show": show}, EXAMPLES)


def list_all(argv: Sequence[str]) -> int:
    parser = Parser(
        "recipes ls",
        "List the recipes: name, evidence, date, purpose.",
        EXAMPLES,
    )
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
        print_inert(f"# {name}: {value}")
    print_inert(f"# file: {recipe.path}\n\n{recipe.path.read_text(encoding='utf-8').rstrip()}")
    return 0


@dataclass(frozen=True)
class Summary:
    """What a listing says about a recipe."""

    purpose: str = ""
    """First sentence of the comment that begins its file, without the numbers of papers."""

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
        return Summary(purpose=f"{type(error).__name__}: {error}", evidence="unreadable")
    return Summary(
        purpose=_purpose(recipe),
        model=" + ".join(_class_of(get(tree, key), "Bundle") for key in dict.fromkeys(policy_keys(tree, "bundle"))),
        algorithm=" + ".join(
            _class_of(get(tree, key)).removeprefix("Diffusion") for key in policy_keys(tree, "algorithm")
        ),
        scorer=_scorer_of(get(tree, "reward.backend", get(tree, "reward"))),
        devices=str(tree.get("num_devices", 1)),
        evidence=recipe.card.evidence,
    )


def _purpose(recipe: RecipeFile) -> str:
    lines = recipe.path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), (line for line in lines if "@package" not in line))
    sentence = " ".join(line.lstrip("# ") for line in comment).partition(". ")[0]
    return PAPER.sub("", sentence).rstrip(".")


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
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    for domain, members in groupby(rows, key=lambda row: row[0].name.rpartition("/")[0]):
        print(f"{domain}/")
        for recipe, summary in members:
            print_inert(_entry(recipe, summary, width))
    print()
    print(textwrap.fill(LEGEND, width))
    print(f"Details: unirl recipes show DOMAIN/RECIPE\n{textwrap.fill(OWN, width)}")
    return 0


def _entry(recipe: RecipeFile, summary: Summary, width: int) -> str:
    """Name, evidence and date of a recipe; its purpose; and what weakens the evidence, if anything."""
    date = "" if recipe.card.date == "none" else recipe.card.date
    outcome, _, remarks = summary.evidence.partition(", ")
    head = f" {recipe.name.rpartition('/')[2]:<{NAME}}{_cut(outcome, OUTCOME - 1):<{OUTCOME}}{date}"
    below = [summary.purpose, f"but {remarks}" if remarks else ""]
    return "\n".join([head.rstrip(), *(f"   {_cut(line, width - 3)}" for line in below if line)])


def _cut(cell: str, size: int) -> str:
    return cell if len(cell) <= size else f"{cell[: size - 2]}.."


def _searchable(recipe: RecipeFile) -> str:
    card = " ".join(asdict(recipe.card).values())
    return f"{recipe.name} {card} {recipe.path.read_text(encoding='utf-8')}".lower()
