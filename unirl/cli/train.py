"""`unirl train RECIPE`, which is also `python -m unirl.train_<domain> --config-name=RECIPE`."""

import sys
from collections.abc import Sequence

from unirl.cli.arguments import RecipeArguments, parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.cli.failures import Session
from unirl.cli.main import run_command
from unirl.cli.signals import stop_on_signal
from unirl.config.errors import Interrupted, Preempted, UsageError
from unirl.config.recipe_files import DOMAIN_OF

EXAMPLES = (
    "unirl train diffusion/quickstart",
    "unirl train diffusion/sd3_trainside scale=toy num_rollouts=3",
    "unirl train diffusion/sd3_trainside num_devices=8 run.name=first --resume auto",
)


def main(argv: Sequence[str], domain: str) -> int:
    """The entrypoint of one domain: trains a recipe of that domain; gives back the exit status."""
    return run_command(lambda words, session: _run(words, session, domain), argv)


def run(argv: list[str], session: Session) -> int:
    return _run(argv, session, None)


def _run(argv: list[str], session: Session, domain: str | None) -> int:
    arguments = read_arguments(argv)
    _check_domain(arguments.recipe, domain)
    if arguments.options.cfg:
        return _print_config(arguments)
    if arguments.options.dry_run:
        from unirl.cli.plan import show_plan

        return show_plan(arguments.recipe, arguments.overrides)
    train(arguments.recipe, arguments.overrides, session)
    return 0


def read_arguments(argv: Sequence[str]) -> RecipeArguments:
    parser = recipe_parser("train", "Train a recipe: plan, then run, saving what it needs to continue.", EXAMPLES)
    parser.option("--cfg", "-c", choices=("job",), help="print the configuration instead of training")
    parser.option("--resolve", action="store_true", help="with --cfg: fill in what ${...} stands for")
    parser.option("--dry-run", action="store_true", help="plan only, as `unirl plan`")
    return parse_recipe(parser, argv)


def train(recipe: str, overrides: Sequence[str], session: Session) -> None:
    """Run a recipe to its end. A signal stops it after the step that runs, and the way to continue is said."""
    from unirl.cli.runs import open_run
    from unirl.trainer.run import continuation

    found = checked(recipe, overrides)
    try:
        with open_run(found, session) as trainer, stop_on_signal(trainer.request_stop):
            trainer.train()
            trainer.tracker.summary(f"{found.file.name}: {trainer.step} steps", [("run", str(session.run_dir))])
    except (Preempted, Interrupted):
        assert session.run_dir is not None
        print(f"continue with:\n  {continuation(found, session.run_dir)}", file=sys.stderr)
        raise


def _check_domain(recipe: str, domain: str | None) -> None:
    bucket = recipe.removesuffix(".yaml").removeprefix("examples/").rpartition("/")[0]
    other = DOMAIN_OF.get(bucket, domain)
    if domain and other != domain:
        raise UsageError(
            f"'{recipe}' is a recipe of the domain '{other}', and this is the entrypoint of '{domain}'. "
            f"Run: python -m unirl.train_{other} --config-name={recipe}"
        )


def _print_config(arguments: RecipeArguments) -> int:
    recipe = checked(arguments.recipe, arguments.overrides)
    print(recipe.composed.text(resolve_all=arguments.options.resolve), end="")
    return 0
