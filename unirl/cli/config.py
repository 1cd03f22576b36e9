"""`unirl config show|why|import`: the settings of a recipe, their documentation, the source of each value, and the
placement to write for a configuration of VRL or RLinf."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from unirl.cli.arguments import Parser, parse_recipe, recipe_parser, run_verb
from unirl.cli.check import checked
from unirl.config.errors import ArgumentError
from unirl.config.failures import Session
from unirl.config.merge import get
from unirl.tracking.streams import print_inert

if TYPE_CHECKING:
    from unirl.config.load import Recipe

EXAMPLES = (
    "unirl config show diffusion/sd3_trainside",
    "unirl config show diffusion/sd3_trainside scale=toy --written",
    "unirl config show diffusion/sd3_trainside --doc",
    "unirl config show diffusion/sd3_trainside sampling.kernel --doc",
    "unirl config why sampling.kernel.eta diffusion/sd3_dancegrpo",
    "unirl config import their_config.yaml --devices 8",
)
WIDTH = 100
"""Characters of a line of documentation, unless the terminal is narrower."""


def run(argv: list[str], session: Session) -> int:
    return run_verb("config", argv, {"show": show, "why": why, "import": import_file}, EXAMPLES)


def show(argv: Sequence[str]) -> int:
    parser = recipe_parser("config show", "Print every setting, with the defaults filled in.", EXAMPLES)
    parser.option("--written", action="store_true", help="only the settings of the recipe and of its overrides")
    parser.option("--doc", action="store_true", help="every key with type, value, default and documentation")
    parser.add_argument("part", nargs="?", metavar="KEY", help="only this key or block, such as sampling.kernel")
    parser.usage = "unirl config show RECIPE [KEY] [key=value ...] [--doc] [--written]"
    arguments = parse_recipe(parser, argv)
    part = arguments.options.part
    recipe = checked(arguments.recipe, arguments.overrides)
    if part is not None:
        recipe.value(part)  # An unknown key is refused with the nearest one.
    if arguments.options.doc:
        _print_docs(recipe, part)
        return 0
    written = arguments.options.written
    tree = recipe.composed.resolved() if written else recipe.public()
    if part is not None:
        print_inert(_yaml(get(tree, part)))
    else:
        print_inert((recipe.composed.text(resolve_all=True) if written else recipe.resolved_text()).rstrip())
    return 0


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False).rstrip().removesuffix("\n...")


def _print_docs(recipe: Recipe, part: str | None) -> None:
    """Every key of the recipe, or those of one block, with its documentation below it."""
    from unirl.config.key_docs import list_keys

    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    for key in list_keys(recipe.root):
        if part is None or key.is_within(part):
            print("\n    ".join([key.line(), *textwrap.wrap(key.doc, width - 4)]))
    if part is None:
        print("\nOne block or key: unirl config show RECIPE KEY --doc. Every setting of every class: docs/settings.md")


def why(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        if argv[:1] in (["-h"], ["--help"]):
            print(f"examples:\n  {EXAMPLES[-2]}\n\nusage: unirl config why KEY RECIPE [key=value ...]")
            return 0
        raise ArgumentError("unirl config why: name a key, then a recipe: unirl config why KEY RECIPE")
    key, *rest = argv
    arguments = parse_recipe(recipe_parser("config why", "Print every source that sets a key.", EXAMPLES), rest)
    recipe = checked(arguments.recipe, arguments.overrides)
    print_inert(f"{key} = {recipe.value(key)}")
    origins = recipe.composed.why(key)
    for origin in origins:
        print_inert(f"  {'->' if origin.wins else '  '} {origin.source:<13} {origin.value}   {origin.place}")
    if not any(origin.wins for origin in origins):
        print("  -> default")
    return 0


def import_file(argv: Sequence[str]) -> int:
    from unirl.config.compose import read_file
    from unirl.config.foreign_placement import import_placement

    parser = Parser("config import", "Print the placement to write for a file of VRL or RLinf.", EXAMPLES[-1:])
    parser.add_argument("file", metavar="FILE", help="a YAML file with distributed.resources (VRL) or cluster (RLinf)")
    parser.option("--devices", type=int, metavar="N", help="devices of all nodes together, if the file says only `all`")
    options = parser.parse(argv)
    print_inert(import_placement(read_file(Path(options.file)).tree, options.devices).block)
    return 0
