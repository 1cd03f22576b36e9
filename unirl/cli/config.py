"""`unirl config show|why`: a recipe's settings in effect, and who set each."""

from collections.abc import Sequence

from unirl.cli.arguments import parse_recipe, recipe_parser, run_verb
from unirl.cli.check import checked
from unirl.cli.failures import Session
from unirl.config.errors import ArgumentError

EXAMPLES = (
    "unirl config show diffusion/sd3_trainside",
    "unirl config show diffusion/sd3_trainside scale=toy --written",
    "unirl config why sampling.kernel.eta diffusion/sd3_dancegrpo",
)


def run(argv: list[str], session: Session) -> int:
    return run_verb("config", argv, {"show": show, "why": why}, EXAMPLES)


def show(argv: Sequence[str]) -> int:
    parser = recipe_parser("config show", "Print every setting, defaults filled in.", EXAMPLES)
    parser.option("--written", action="store_true", help="only what the recipe and its overrides set")
    arguments = parse_recipe(parser, argv)
    recipe = checked(arguments.recipe, arguments.overrides)
    print((recipe.composed.text(resolve_all=True) if arguments.options.written else recipe.resolved_text()).rstrip())
    return 0


def why(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        if argv[:1] in (["-h"], ["--help"]):
            print("examples:\n  " + EXAMPLES[2] + "\n\nusage: unirl config why KEY RECIPE [key=value ...]")
            return 0
        raise ArgumentError("unirl config why: name a key, then a recipe: unirl config why KEY RECIPE")
    key, *rest = argv
    arguments = parse_recipe(recipe_parser("config why", "Say who set a key.", EXAMPLES), rest)
    recipe = checked(arguments.recipe, arguments.overrides)
    print(f"{key} = {recipe.value(key)}")
    said = recipe.composed.why(key)
    for origin in said:
        print(f"  {'->' if origin.wins else '  '} {origin.source:<13} {origin.value}   {origin.place}")
    if not any(origin.wins for origin in said):
        print("  -> default")
    return 0
