"""`unirl check RECIPE`: checks everything about a recipe that needs no loaded model."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    with collector_paused():
        recipe = checked(arguments.recipe, arguments.overrides)
        from unirl.plan.prompts import load_data

        load_data(recipe)
    say_missing_engines(recipe)
    say_crowded(recipe)
    if arguments.options.json:
        print(json.dumps(recipe.public(), indent=1))
    else:
        from unirl.plan.credit import credit_of_tracks
        from unirl.plan.placement import plan_of
        from unirl.plan.preflight import trainer_class

        print(f"{recipe.file.name}: valid ({recipe.file.path})")
        for name, policy in recipe.policies.items():
            print(f"{name}: {plan_of(policy).describe()}" if name else plan_of(policy).describe())
        for name, reward in credit_of_tracks(recipe, trainer_class(recipe.config).track).items():
            print(f"reward of {name}: {reward}")
    return 0


def say_missing_engines(recipe: Recipe) -> None:
    """Says on stderr if a run would be refused here because the server of an engine, or an environment, is missing."""
    from unirl.config.errors import DependencyError
    from unirl.plan.machine import check_engines

    try:
        check_engines(recipe)
    except DependencyError as error:
        print(f"unirl: a run would be refused here: {error}", file=sys.stderr)


def say_crowded(recipe: Recipe) -> None:
    """Says on stderr if a run would have more processes than this machine has cores, and no GPU."""
    from unirl.plan.threads import crowded

    why = crowded(recipe.config)
    if why is not None:
        print(f"unirl: {why}", file=sys.stderr)


def checked(recipe: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, after every check that needs no model. Notices about settings without effect go to stderr."""
    with collector_paused():
        from unirl.config.load import load
        from unirl.plan.preflight import preflight

        loaded = load(recipe, overrides)
        preflight(loaded).print_notices()
        from unirl.plan.machine import hidden_devices, is_elsewhere

        hidden = None if is_elsewhere(loaded.config) else hidden_devices(loaded.config)
        if hidden is not None:
            print(f"unirl: a run would be refused here: {hidden}", file=sys.stderr)
    return loaded


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, which otherwise spends a fifth of a check on the modules that it imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
