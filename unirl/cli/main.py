"""The command `unirl`: runs the module of a command, and turns an exception into a message and an exit status."""

import atexit
import faulthandler
import gc
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import unirl
from unirl.cli.start import IMPORTS, SLOW, shown_start
from unirl.config import plugins, trust
from unirl.config.errors import ArgumentError, StoppedAtStart, UsageError, did_you_mean
from unirl.config.failures import Session, failure_of
from unirl.tracking.streams import inert, say, silence
from unirl.types.secrets import conceal_environment, redact

COMMANDS: Mapping[str, str] = {
    "quickstart": "train the small built-in model on a CPU, and show that its rewards rise",
    "train": "train a recipe",
    "plan": "print geometry, devices, parameters, memory and time of a recipe, without training",
    "fit": "find the fastest settings of a recipe that fit into memory",
    "check": "check a recipe: keys, types, geometry, compatibility",
    "runs": "list runs: state, steps, reward, age",
    "tail": "follow the console of a run, from its files",
    "view": "show runs in a browser: curves, samples, settings, comparisons",
    "report": "write one HTML file about a run, to read anywhere",
    "compare": "compare runs: settings, held-out rewards with intervals, cost",
    "recipes": "list, search and show recipes",
    "eval": "score a checkpoint on held-out prompts",
    "sample": "generate images, videos or texts with a checkpoint",
    "bench": "measure the training loop on fixed work, and compare two reports",
    "replay": "repeat a recorded step, and say whether its samples and rewards have the same bits",
    "reward": "list scorers, score and check your own samples, serve rewards",
    "data": "check and show prompt files, download public ones",
    "export": "write a checkpoint as files that other libraries can load",
    "engines": "serve a small model with the messages of a rollout engine, to try and test its client",
    "models": "check the files of a model, download a model",
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
    # At its end a process collects garbage among all modules that it imported, which takes as long as half of a check.
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Some locales lack characters of prompts and names.
    if "" not in sys.path and not sys.flags.safe_path:
        sys.path.append("")  # Plugins are found in the current folder, as with `python -m`.
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)  # A crash in native code names the line that called it.
    return run_command(_dispatch, sys.argv[1:] if argv is None else argv)


def run_command(body: Callable[[list[str], Session], int], argv: Sequence[str]) -> int:
    """Runs `body(argv, session)`. Only here does an exception become a message and an exit status."""
    session = Session(argv=tuple(argv))
    plugins.forget()
    trust.forget()
    conceal_environment(os.environ)
    try:
        return body([word for word in argv if word != "--debug"], session)
    except SystemExit as left:
        failure = failure_of(left)
        if failure.is_bug:
            return int(left.code or 0)  # argparse raises this after -h.
        _say_last(inert(failure.message))
        return failure.status
    except BrokenPipeError:
        # The reader of our output ended (`unirl recipes | head`). Python must not complain about it at shutdown.
        silence(sys.stdout)
        return 141
    except (Exception, KeyboardInterrupt, StoppedAtStart) as error:
        # A broad except is right here: a user must never see a traceback without --debug.
        failure = failure_of(error)
        if session.debug:
            say(traceback.format_exc())
        crash = _save_crash(error, session) if failure.is_bug else None
        _say_last(inert(failure.message + (f"\n  The traceback is in {crash}" if crash else "")))
        return failure.status


def _say_last(text: str) -> None:
    """Say why the command ends. If the full disk holds this output, too, only the exit status says it."""
    try:
        say(text)
        sys.stdout.flush()
    except OSError:
        silence(sys.stderr)
        silence(sys.stdout)


def _save_crash(error: BaseException, session: Session) -> Path | None:
    """Writes the traceback into the run, working or temporary directory. Returns the file, or None if all fail."""
    name = f"unirl-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = f"unirl {unirl.__version__}  {' '.join(session.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (session.run_dir, Path.cwd(), Path(tempfile.gettempdir())):
        try:
            if folder is not None:
                # Arguments that the locale cannot decode are surrogates, which UTF-8 cannot encode.
                (folder / name).write_text(redact(text), encoding="utf-8", errors="backslashreplace")
                return folder / name
        except OSError:
            continue  # The folder is not writable or full: try the next one.
    return None


def _check_encoding(argv: Sequence[str]) -> None:
    """Refuses arguments that the locale cannot decode. No file could be named after them."""
    for word in argv:
        if any("\udc80" <= letter <= "\udcff" for letter in word):
            raise ArgumentError(
                f"the argument {word!a} has letters that this locale cannot decode "
                f"({sys.getfilesystemencoding()}). Set PYTHONUTF8=1, or a UTF-8 locale such as LC_ALL=C.UTF-8"
            )


def _dispatch(argv: list[str], session: Session) -> int:
    _check_encoding(argv)
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
    if command in IMPORTS:
        with shown_start(Session()):
            import_module(f"unirl.cli.{command}")
    if command not in SLOW:
        return run_module(command, rest, session)
    with shown_start(session):
        return run_module(command, rest, session)


def run_module(command: str, argv: list[str], session: Session) -> int:
    """Runs the module of a command. Returns the exit status."""
    status: int = import_module(f"unirl.cli.{command}").run(argv, session)
    return status


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
