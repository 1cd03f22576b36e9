"""`unirl check RECIPE`: checks everything about a recipe that needs no loaded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.config.failures import Session

if TYPE_CHECKING:
    from unirl.config.load import Recipe

EXAMPLES = (
    "unirl check diffusion/sd3_trainside",
    "unirl check diffusion/sd3_trainside num_devices=8 batch_size=48",
    "unirl check my_recipe.yaml --json",
)


def run(argv: list[str], session: Session) -> int:
    parser = recipe_parser("check", "Check a recipe: keys, types, ranges, geometry, compatibility, prompts.", EXAMPLES)
    parser.option("--json", action="store_true", help="print every setting, with defaults filled in, as JSON")
    arguments = parse_recipe(parser, argv)
    recipe = checked(arguments.recipe, arguments.overrides)
    from unirl.trainer.assemble import load_data

    load_data(recipe)
    if arguments.options.json:
        print(json.dumps(recipe.resolved(), indent=1))
    else:
        from unirl.plan.placement import plan_of

        print(f"{recipe.file.name}: valid ({recipe.file.path})\n{plan_of(recipe.config).describe()}")
    return 0


def checked(recipe: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, after every check that needs no model. Raises an error for the first rule that it breaks.

    Notices about settings without effect go to stderr.
    """
    from unirl.config.load import load
    from unirl.plan.preflight import preflight

    loaded = load(recipe, overrides)
    preflight(loaded).print_notices()
    return loaded
