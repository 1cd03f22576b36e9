"""`unirl config show|why`: the settings of a recipe, their documentation, and the source of each value."""

import textwrap
from collections.abc import Sequence

from unirl.cli.arguments import parse_recipe, recipe_parser, run_verb
from unirl.cli.check import checked
from unirl.config.errors import ArgumentError
from unirl.config.failures import Session

EXAMPLES = (
    "unirl config show diffusion/sd3_trainside",
    "unirl config show diffusion/sd3_trainside scale=toy --written",
    "unirl config show diffusion/sd3_trainside --doc",
    "unirl config why sampling.kernel.eta diffusion/sd3_dancegrpo",
)


def run(argv: list[str], session: Session) -> int:
    return run_verb("config", argv, {"show": show, "why": why}, EXAMPLES)


def show(argv: Sequence[str]) -> int:
    parser = recipe_parser("config show", "Print every setting, with the defaults filled in.", EXAMPLES)
    parser.option("--written", action="store_true", help="only the settings of the recipe and of its overrides")
    parser.option("--doc", action="store_true", help="every key with its type, default and documentation")
    arguments = parse_recipe(parser, argv)
    recipe = checked(arguments.recipe, arguments.overrides)
    if arguments.options.doc:
        from unirl.config.key_docs import list_keys

        for key in list_keys(recipe.root):
            lines = textwrap.wrap(key.doc, 96)
            print("\n    ".join([f"{key.path}: {key.type} = {key.default}", *lines]))
        return 0
    print((recipe.composed.text(resolve_all=True) if arguments.options.written else recipe.resolved_text()).rstrip())
    return 0


def why(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        if argv[:1] in (["-h"], ["--help"]):
            print(f"examples:\n  {EXAMPLES[-1]}\n\nusage: unirl config why KEY RECIPE [key=value ...]")
            return 0
        raise ArgumentError("unirl config why: name a key, then a recipe: unirl config why KEY RECIPE")
    key, *rest = argv
    arguments = parse_recipe(recipe_parser("config why", "Print every source that sets a key.", EXAMPLES), rest)
    recipe = checked(arguments.recipe, arguments.overrides)
    print(f"{key} = {recipe.value(key)}")
    origins = recipe.composed.why(key)
    for origin in origins:
        print(f"  {'->' if origin.wins else '  '} {origin.source:<13} {origin.value}   {origin.place}")
    if not any(origin.wins for origin in origins):
        print("  -> default")
    return 0
