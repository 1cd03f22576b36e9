"""`unirl train RECIPE`, which runs the entrypoint of the recipe's domain: `python -m unirl.train_<domain>`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from unirl.cli.arguments import RecipeArguments, parse_recipe, recipe_parser
from unirl.cli.signals import stoppable_start
from unirl.config.errors import ArgumentError, LostWorkerError, Preempted, StoppedAtStart, UsageError
from unirl.config.failures import Session
from unirl.config.ranks import TORCHRUN_ID
from unirl.config.recipe_files import DOMAIN_OF
from unirl.tracking.streams import say

if TYPE_CHECKING:
    from unirl.config.compose import ComposedConfig
    from unirl.distributed.group.torchrun import TorchrunRank

EXAMPLES = (
    "unirl train diffusion/quickstart",
    "unirl train diffusion/sd3_trainside scale=toy num_rollouts=3",
    "unirl train diffusion/sd3_trainside num_devices=8 run.name=first --resume auto",
)
Entrypoint = Callable[[RecipeArguments, Session], None]
"""`train` of a module `unirl.train_<domain>`."""


def run(argv: list[str], session: Session) -> int:
    return parsed(train)(argv, session)


def train(arguments: RecipeArguments, session: Session) -> None:
    """Train a recipe by the entrypoint of its domain. A recipe outside the domains' folders suits every entrypoint."""
    domain = domain_of(arguments.recipe) or "diffusion"
    entrypoint: Entrypoint = import_module(f"unirl.train_{domain}").train
    entrypoint(arguments, session)


def parsed(train: Entrypoint, domain: str | None = None) -> Callable[[list[str], Session], int]:
    """The command around `train`: reads the arguments, and only shows what would be run if they ask for that.

    Args:
        domain: the only domain whose recipes are accepted.
    """

    def command(argv: list[str], session: Session) -> int:
        parser = recipe_parser("train", "Train a recipe: plan, then run, saving what it needs to continue.", EXAMPLES)
        parser.option("--cfg", "-c", choices=("job",), help="print the configuration instead of training")
        parser.option("--resolve", action="store_true", help="with --cfg: fill in what ${...} stands for")
        parser.option("--dry-run", action="store_true", help="plan only, as `unirl plan`")
        arguments = parse_recipe(parser, argv)
        # Libraries are imported after the run can be stopped, but the ranks of torchrun need them to meet.
        start = _run if TORCHRUN_ID not in os.environ else _run_as_rank
        return start(train, domain, arguments, session)

    return command


def _run_as_rank(train: Entrypoint, domain: str | None, arguments: RecipeArguments, session: Session) -> int:
    """The part of one process that torchrun started."""
    from unirl.distributed.group.torchrun import LOST, release_ranks, torchrun_rank

    own = torchrun_rank()
    assert own is not None, "TORCHRUN_ID is set"
    if own.rank:
        from unirl.distributed.group.torchrun_worker import serve_rank

        return serve_rank(own)
    try:
        return _run(train, domain, on_ranks(own, arguments), session)
    except (StoppedAtStart, Preempted) as stopped:
        if LOST:  # after which torchrun stops the other ranks
            raise LostWorkerError(
                f"{LOST[0]} died, and torchrun stopped this run: {stopped}. torchrun reports the exit status of the "
                "rank"
            ) from stopped
        raise
    finally:
        release_ranks(own)


def _run(train: Entrypoint, domain: str | None, arguments: RecipeArguments, session: Session) -> int:
    _check_domain(arguments.recipe, domain)
    if arguments.options.cfg:
        composed = printed(arguments)
        print(composed.text(resolve_all=arguments.options.resolve), end="")
        return 0
    if arguments.options.dry_run:
        from unirl.cli.plan import show_plan

        return show_plan(arguments.recipe, arguments.overrides)
    with stoppable_start(session):
        train(arguments, session)
    return 0


def on_ranks(own: TorchrunRank, arguments: RecipeArguments) -> RecipeArguments:
    """The arguments of a run on the processes that torchrun started.

    Raises:
        ArgumentError: 2002 for another runtime or number of devices than these.
    """
    typed = dict(word.lstrip("+").partition("=")[::2] for word in arguments.overrides)
    for key, value in (("runtime", "torchrun"), ("num_devices", str(own.world_size))):
        if typed.get(key, value) != value:
            raise ArgumentError(
                f"{key}={typed[key]}: torchrun started WORLD_SIZE={own.world_size} processes, which are the devices of "
                f"the run. Leave {key} out, or start the run without torchrun"
            )
    words = ["runtime=torchrun", f"num_devices={own.world_size}"]
    if own.local_world_size < own.world_size:
        words.append(f"devices_per_node={own.local_world_size}")
    return replace(arguments, overrides=(*arguments.overrides, *words))


def printed(arguments: RecipeArguments) -> ComposedConfig:
    """The configuration to print: checked, unless a check would import a package of a recipe's `plugins`."""
    from unirl.cli.check import checked
    from unirl.config.compose import compose
    from unirl.config.load import needed_plugins

    composed = compose(arguments.recipe, arguments.overrides)
    named = needed_plugins(replace(composed, layers=(*composed.layers, composed.layers[-1])))
    if not named:
        return checked(arguments.recipe, arguments.overrides).composed
    say(f"unirl: printed as written and not checked, since a check imports {', '.join(dict.fromkeys(named))}")
    return composed


def domain_of(recipe: str) -> str | None:
    """The domain of the folder that a recipe is named with; None for a recipe elsewhere."""
    return DOMAIN_OF.get(recipe.removesuffix(".yaml").removeprefix("examples/").rpartition("/")[0])


def _check_domain(recipe: str, domain: str | None) -> None:
    other = domain_of(recipe)
    if domain and other and other != domain:
        raise UsageError(
            f"'{recipe}' is a recipe of the domain '{other}', and this is the entrypoint of '{domain}'. "
            f"Run: python -m unirl.train_{other} --config-name={recipe}"
        )
