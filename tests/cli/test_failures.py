"""What the user sees when something fails: one message, the right exit status, a traceback only on request."""

import errno
import functools
import os
import resource
import subprocess
import sys

import pytest
import torch

from unirl.cli.main import COMMANDS, main, run_command
from unirl.config import errors
from unirl.config.failures import failure_of


def fail_with(error: BaseException, argv=(), run_dir=None) -> int:
    def body(_words, session):
        session.run_dir = run_dir
        raise error

    return run_command(body, argv)


@pytest.mark.parametrize(
    ("error", "status", "start"),
    [
        (errors.UsageError("no"), 2, "error[2001]: no"),
        (errors.GeometryError("no"), 2, "error[2010]: no"),
        (errors.DependencyError("no"), 3, "error[3001]: no"),
        (errors.DataError("no"), 4, "error[4002]: no"),
        (errors.ResourceError("no"), 5, "error[5001]: no"),
        (errors.RewardError("no"), 6, "error[6002]: no"),
        (errors.CheckpointError("no"), 7, "error[7001]: no"),
        (errors.StallError("no"), 8, "error[8001]: no"),
        (errors.DivergenceError("no"), 9, "error[9001]: no"),
        (errors.WorkerError("no"), 10, "error[10001]: no"),
        (errors.Preempted("saved"), 75, "unirl: saved"),
        (errors.Interrupted("saved"), 130, "unirl: saved"),
        (KeyboardInterrupt(), 130, "unirl: interrupted"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json"),
            7,
            "error[7003]: the disk is full while writing x",
        ),
        (
            OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
            7,
            "error[7003]: a file reached the largest size that this process may write (ulimit -f) (OSError",
        ),
        (MemoryError(), 5, "error[5002]: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 5, "error[5002]: out of memory: CUDA"),
        (ModuleNotFoundError("No module named 'ray'", name="ray.util"), 3, "error[3001]: the Python package 'ray'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_failure_has_its_status_and_no_traceback(capsys, error, status, start):
    assert fail_with(error) == status
    shown = capsys.readouterr()
    assert shown.err.startswith(start)
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_failed_allocation_on_the_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert failure_of(caught.value).status == 5


def test_debug_shows_the_traceback_and_keeps_the_status(capsys):
    assert fail_with(errors.DataError("no"), argv=["--debug"]) == 4
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.rstrip().endswith("error[4002]: no")


def test_debug_is_not_passed_on():
    assert run_command(lambda words, session: words != ["a"] or not session.debug, ["--debug", "a"]) == 0


def test_a_bug_leaves_its_traceback_in_the_working_directory(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fail_with(ZeroDivisionError("division by zero")) == 1
    shown = capsys.readouterr().err
    (crash,) = tmp_path.iterdir()
    assert "ZeroDivisionError: division by zero" in shown
    assert "bug in UniRL" in shown
    assert "Traceback (" not in shown
    assert str(crash) in shown
    assert "Traceback (most recent call last)" in crash.read_text()


def test_a_bug_of_a_run_leaves_its_traceback_in_the_run_directory(tmp_path):
    assert fail_with(KeyError("x"), run_dir=tmp_path) == 1
    assert [path.name.startswith("unirl-crash-") for path in tmp_path.iterdir()] == [True]


def test_a_crash_file_holds_arguments_that_the_locale_cannot_decode(tmp_path):
    assert fail_with(KeyError("x"), argv=["caf\udcc3\udca9"], run_dir=tmp_path) == 1
    (crash,) = tmp_path.iterdir()
    assert "KeyError" in crash.read_text(encoding="utf-8")


def test_a_module_of_our_own_that_is_missing_is_a_bug():
    assert failure_of(ModuleNotFoundError("No module named 'unirl.x'", name="unirl.x")).is_bug


def test_an_unknown_command_gets_a_suggestion(capsys):
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_shows_three_examples_first_and_every_command(capsys, argv):
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("examples:\n")
    assert shown.split("\n\n")[0].count("unirl ") == 3
    assert all(f"\n  {command} " in shown for command in COMMANDS)


def test_the_status_survives_output_that_goes_to_a_full_disk(tmp_path):
    words = [sys.executable, "-m", "unirl.cli", "check", "no/such/recipe"]
    with open(tmp_path / "log", "w") as log:
        full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))
        done = subprocess.run(words, stdout=log, stderr=log, preexec_fn=full)
    assert done.returncode == 2 and (tmp_path / "log").read_text() == ""
