"""Train a policy that acts in environments.

    python -m unirl.train_embodied --config-name=embodied/<recipe> [key=value ...]

`unirl train embodied/<recipe>` is the same command.
"""

import sys
from collections.abc import Sequence

from unirl.cli.arguments import RecipeArguments
from unirl.cli.main import run_command
from unirl.cli.signals import stop_on_signal
from unirl.cli.train import parsed
from unirl.config.failures import Session


def train(arguments: RecipeArguments, session: Session) -> None:
    """Load the recipe, check what it implies, build its trainer, and run the loop. A lost worker restarts it."""
    # Imports of libraries take seconds, in which a stop signal must end the command in order (`stoppable_start`).
    from unirl.config.load import load
    from unirl.plan.preflight import preflight
    from unirl.trainer.restarts import attempts

    recipe = load(arguments.recipe, arguments.overrides)
    preflight(recipe).print_notices()
    for attempt in attempts(recipe, session):
        with attempt, attempt.trainer(stop_on_signal) as trainer:
            trainer.train()


def main(argv: Sequence[str]) -> int:
    """Run the command line of this entrypoint. Returns the exit status."""
    return run_command(parsed(train, domain="embodied"), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
