"""The command `unirl`: runs the module of a command, and turns an exception into a message and an exit status."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import unirl
from unirl.cli.failures import save_crash
from unirl.config.errors import UsageError, did_you_mean
from unirl.config.failures import Session, failure_of

COMMANDS: Mapping[str, str] = {
    "quickstart": "train the small built-in model on a CPU, and show that its rewards rise",
    "train": "train a recipe",
    "plan": "print geometry, devices, parameters and memory of a recipe, without training",
    "check": "check a recipe: keys, types, geometry, compatibility",
    "recipes": "list, search and show recipes",
    "eval": "score a checkpoint on held-out prompts",
    "sample": "generate images, videos or texts with a checkpoint",
    "reward": "list scorers, score and check your own samples, serve rewards",
    "data": "check and show prompt files, download public ones",
    "export": "write a checkpoint as files that other libraries can load",
    "ckpt": "list, verify, show and prune checkpoints",
    "config": "show the settings of a recipe, their documentation and their sources",
    "env": "print versions, devices and settings, for a bug report",
    "doctor": "check that this machine can run UniRL",
}
"""Command to its summary. The module `unirl.cli.<command>` has `run(argv, session) -> exit status`."""

EXAMPLES = """\
examples:
  unirl quickstart
  unirl train diffusion/sd3_trainside scale=toy num_rollouts=3
  unirl plan diffusion/sd3_trainside num_devices=8
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `unirl <argv>`. Returns the exit status: 0, or the status of the error (unirl/config/errors.py)."""
    return run_command(_dispatch, sys.argv[1:] if argv is None else argv)


def run_command(body: Callable[[list[str], Session], int], argv: Sequence[str]) -> int:
    """Runs `body(argv, session)`. Only here does an exception become a message and an exit status."""
    session = Session(argv=tuple(argv))
    try:
        return body([word for word in argv if word != "--debug"], session)
    except SystemExit as left:
        return int(left.code or 0)  # argparse raises this after -h.
    except BrokenPipeError:
        # The reader of our output ended (`unirl recipes | head`). Python must not complain about it at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt) as error:
        # A broad except is right here: a user must never see a traceback without --debug.
        failure = failure_of(error)
        if session.debug:
            traceback.print_exc()
        crash = save_crash(error, session) if failure.is_bug else None
        print(failure.text(crash), file=sys.stderr)
        return failure.status


def _dispatch(argv: list[str], session: Session) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"unirl {unirl.__version__}")
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        raise UsageError(
            f"unknown command '{command}'.{did_you_mean(command, COMMANDS)} Commands: {', '.join(COMMANDS)}"
        )
    return import_module(f"unirl.cli.{command}").run(rest, session)


def _help() -> str:
    commands = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    return (
        f"{EXAMPLES}\n"
        "usage: unirl COMMAND [arguments] [--debug]\n\n"
        f"commands (unirl COMMAND -h for details):\n{commands}\n\n"
        "options:\n"
        "  -h, --help     this page\n"
        "  --version      the version\n"
        "  --debug        show the traceback of an error"
    )
