"""`unirl train RECIPE`, which runs the entrypoint of the recipe's domain: `python -m unirl.train_<domain>`.

The first stop signal lets a run finish its step and save; the second one stops it at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

from unirl.cli.arguments import RecipeArguments, parse_recipe, recipe_parser
from unirl.config.errors import UsageError
from unirl.config.failures import Session
from unirl.config.recipe_files import DOMAIN_OF
from unirl.tracking.streams import say

EXAMPLES = (
    "unirl train diffusion/quickstart",
    "unirl train diffusion/sd3_trainside scale=toy num_rollouts=3",
    "unirl train diffusion/sd3_trainside num_devices=8 run.name=first --resume auto",
)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, the two signals that schedulers send before they end a job, and that of a terminal that is closed."""
SHOW_CURSOR = "\x1b[?25h"
"""Shows the cursor of a terminal, which a live display hides."""
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
        _check_domain(arguments.recipe, domain)
        if arguments.options.cfg:
            from unirl.cli.check import checked

            composed = checked(arguments.recipe, arguments.overrides).composed
            print(composed.text(resolve_all=arguments.options.resolve), end="")
            return 0
        if arguments.options.dry_run:
            from unirl.cli.plan import show_plan

            return show_plan(arguments.recipe, arguments.overrides)
        train(arguments, session)
        return 0

    return command


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


@contextmanager
def stop_on_signal(request_stop: Callable[[int], None]) -> Iterator[None]:
    """Inside the block the first stop signal calls `request_stop(number)`; the second ends this process at once.

    After the second signal nothing is cleaned up. What was saved stays valid, and workers end with this process.

    The shell and the kernel may both send SIGHUP when a terminal is closed, so it never counts as the second. It stays
    ignored if it was, as by nohup.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, _: FrameType | None) -> None:
        # Past sys.stderr, which a live display replaces, and whose lock another thread may hold.
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        text = f"{cursor}unirl: {signal.Signals(number).name}: stopped at once, without saving\n"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(128 + number)

    def stop(number: int, _: FrameType | None) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else end)
        request_stop(number)
        say(f"unirl: {signal.Signals(number).name}: finishing this step, then saving. A second signal stops at once")

    for number in STOPPING:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
