"""`unirl recipes ls|search|show`: what can be trained, and what was seen of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from unirl.cli.arguments import Parser, run_verb
from unirl.cli.failures import Session
from unirl.config.errors import UsageError
from unirl.config.recipe_files import RecipeFile, find_recipe, list_recipes

EXAMPLES = ("unirl recipes", "unirl recipes search grpo --json", "unirl recipes show diffusion/sd3_trainside")


def run(argv: list[str], session: Session) -> int:
    return run_verb("recipes", argv, {"ls": list_all, "search": search, "show": show}, EXAMPLES)


def list_all(argv: Sequence[str]) -> int:
    parser = Parser("recipes ls", "List the recipes with what is known of each.", EXAMPLES)
    parser.option("--json", action="store_true", help="as JSON")
    return _print_listing(list_recipes(), parser.parse(argv).json)


def search(argv: Sequence[str]) -> int:
    parser = Parser("recipes search", "List the recipes whose name, text or card holds the words.", EXAMPLES)
    parser.add_argument("words", nargs="+", metavar="TEXT")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    wanted = [word.lower() for word in options.words]
    found = [recipe for recipe in list_recipes() if all(word in _searchable(recipe) for word in wanted)]
    if not found and not options.json:
        raise UsageError(f"no recipe mentions {' and '.join(options.words)}. All: unirl recipes")
    return _print_listing(found, options.json)


def show(argv: Sequence[str]) -> int:
    parser = Parser("recipes show", "Print a recipe and its card.", EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE")
    recipe = find_recipe(parser.parse(argv).recipe)
    for name, value in asdict(recipe.card).items():
        print(f"# {name}: {value}")
    print(f"# file: {recipe.path}\n\n{recipe.path.read_text(encoding='utf-8').rstrip()}")
    return 0


def _print_listing(recipes: Sequence[RecipeFile], as_json: bool) -> int:
    if as_json:
        rows = [{"name": recipe.name, "path": str(recipe.path), **asdict(recipe.card)} for recipe in recipes]
        print(json.dumps(rows, indent=1))
        return 0
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        print(f"{recipe.name:<{width}}  {recipe.card.status:<9} {recipe.card.result}")
    return 0


def _searchable(recipe: RecipeFile) -> str:
    card = " ".join(asdict(recipe.card).values())
    return f"{recipe.name} {card} {recipe.path.read_text(encoding='utf-8')}".lower()
