"""Runs that start again by themselves after a lost worker: how often, after which errors, and with equal results."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.trainer.child import begin, said
from tests.trainer.killing import outcome, steps_in
from tests.warm_ray_worker import SOCKET
from unirl.cli.signals import stop_on_signal
from unirl.config.errors import DataError, LostWorkerError, ResourceError, StallError, WorkerError
from unirl.config.failures import Restart, Session
from unirl.config.load import Recipe, load
from unirl.tracking.tables import read_rows
from unirl.trainer import restarts
from unirl.trainer.restarts import Attempt, attempts

RAY = (
    "scale=toy", "num_devices=2", "save_interval=1", "num_rollouts=6", "tracking.sample_steps=0",
    "evaluation.eval_steps=0",
)  # fmt: skip


def ends(session: Session, errors: list[Exception], *overrides: str, stop: bool = False) -> list[Attempt]:
    """The attempts of a run whose attempts end with these errors, one after another, and then well."""
    recipe = load("diffusion/sd3_trainside", ["scale=toy", *overrides])
    done = []
    for attempt in attempts(recipe, session):
        done.append(attempt)
        with attempt:
            attempt.is_stopping = stop
            if errors:
                raise errors.pop(0)
    return done


def test_a_lost_worker_and_a_stall_restart_the_run_in_its_own_folder(tmp_path: Path) -> None:
    session = Session(run_dir=tmp_path)
    first, second, third = ends(session, [LostWorkerError("worker 1 died\nand so on"), StallError("no progress")])
    assert first.recipe.config.run.dir is None
    assert second.recipe.config.run.dir == third.recipe.config.run.dir == str(tmp_path)
    assert session.restart == Restart(2, 3, "no progress", 1)


def test_a_run_that_began_from_a_checkpoint_elsewhere_begins_there_again_until_it_has_its_own(tmp_path: Path) -> None:
    session = Session(run_dir=tmp_path)
    errors = [LostWorkerError("died")]
    assert ends(session, errors.copy(), "resume=elsewhere")[1].recipe.config.resume == "elsewhere"
    (tmp_path / "checkpoints/checkpoint-000001").mkdir(parents=True)
    assert ends(session, errors, "resume=elsewhere")[1].recipe.config.resume == "auto"


def test_a_stop_signal_reaches_the_trainer_only_while_it_trains_and_ends_the_restarts(tmp_path, monkeypatch) -> None:
    """Signal handlers begin after the trainer is built, and end before it is closed."""
    events: list[object] = []

    class Builds:
        """In place of `build_trainer`: its context and its trainer."""

        def __init__(self, recipe: Recipe, session: Session) -> None:
            events.append(signal.getsignal(signal.SIGTERM))

        def __enter__(self) -> Builds:
            return self

        def __exit__(self, *error: object) -> None:
            events.append(signal.getsignal(signal.SIGTERM))

        def request_stop(self, signum: int) -> None:
            events.append(signum)

    monkeypatch.setattr(restarts, "build_trainer", Builds)
    before = signal.getsignal(signal.SIGTERM)
    recipe = load("diffusion/sd3_trainside", ["scale=toy"])
    with pytest.raises(LostWorkerError):
        for attempt in attempts(recipe, Session(run_dir=tmp_path)):
            with attempt, attempt.trainer(stop_on_signal):
                signal.raise_signal(signal.SIGTERM)
                raise LostWorkerError("died while it stopped")
    assert events == [before, signal.SIGTERM, before]


@pytest.mark.parametrize("error", [DataError("no file"), WorkerError("a bug in a role"), RuntimeError("a bug")])
def test_errors_that_would_come_again_end_the_run(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error), match=str(error)):
        ends(Session(run_dir=tmp_path), [error])


def test_restarts_are_counted_within_a_window_and_the_last_error_says_so(tmp_path: Path) -> None:
    lost = [LostWorkerError(f"loss {i}") for i in range(3)]
    with pytest.raises(LostWorkerError, match=r"loss 2\n.*restarted 2 times within 3600 s"):
        ends(Session(run_dir=tmp_path), lost.copy(), "restarts.max=2")
    assert len(ends(Session(run_dir=tmp_path), lost.copy(), "restarts={max: 1, window_s: 1e-9}")) == 4
    with pytest.raises(LostWorkerError, match=r"^loss 0$"):
        ends(Session(run_dir=tmp_path), lost, "restarts.max=0")


def test_a_run_that_was_told_to_stop_or_has_no_folder_yet_does_not_restart(tmp_path: Path) -> None:
    for session, stop in ((Session(run_dir=tmp_path), True), (Session(), False)):
        with pytest.raises(LostWorkerError):
            ends(session, [LostWorkerError("died")], stop=stop)


def test_a_cluster_that_is_too_small_for_a_restart_ends_the_run_by_the_worker_that_was_lost(tmp_path: Path) -> None:
    errors = [LostWorkerError("worker 1 died"), ResourceError("the run needs 2 machines")]
    with pytest.raises(LostWorkerError, match=r"^worker 1 died\n  The run could not start again: the run needs 2"):
        ends(Session(run_dir=tmp_path), errors)


def test_a_run_that_lost_devices_goes_on_with_as_many_as_its_counts_allow(tmp_path: Path) -> None:
    four, lacking = ("runtime=ray", "num_devices=4", "restarts.wait_s=0"), ResourceError("the run needs 4 machines")
    session, errors = Session(run_dir=tmp_path), [LostWorkerError("node b left"), lacking]
    done = ends(session, errors.copy(), *four, "restarts.min_devices=1")
    assert [attempt.recipe.config.num_devices for attempt in done] == [4, 4, 2]  # the samples do not divide by 3
    assert session.restart == Restart(1, 3, "node b left", 2)
    with pytest.raises(LostWorkerError, match=r"needs 4 machines. No smaller num_devices from restarts.min_devices=3"):
        ends(Session(run_dir=tmp_path), errors.copy(), *four, "restarts.min_devices=3")


def test_a_restart_waits_for_the_devices_of_a_cluster_that_it_joined(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(restarts, "POLL_S", 0.0)
    lacking = ResourceError("the run needs 2 machines")
    two = ("runtime=ray", "num_devices=2", "restarts.min_devices=1")
    done = ends(Session(run_dir=tmp_path), [LostWorkerError("node b left"), lacking, lacking], *two)
    assert [attempt.recipe.config.num_devices for attempt in done] == [2, 2, 2, 2]
    done = ends(Session(run_dir=tmp_path), [LostWorkerError("node b left"), lacking], *two, "restarts.wait_s=0")
    assert [attempt.recipe.config.num_devices for attempt in done] == [2, 2, 1]


def workers_of(driver: int) -> list[int]:
    """The processes of Ray workers in the session of a driver."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == driver and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                found.append(int(entry.name))
        except OSError:
            continue  # the process ended meanwhile
    return sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.executable, reason="Ray starts no workers from a path with a blank")
def test_a_run_whose_worker_is_killed_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)  # the workers of Ray itself belong to the session of the driver
    unkilled, killed = (begin("diffusion/sd3_trainside", tmp_path / name, *RAY, own_session=True) for name in "ab")
    assert wait_until(lambda: steps_in(tmp_path / "b") >= 2 or not killed.is_alive(), 600)
    victim = workers_of(killed.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    for run in (unkilled, killed):
        run.join(600)
    assert unkilled.exitcode == killed.exitcode == 0, said(tmp_path / "b")
    assert outcome(tmp_path / "b", 6) == outcome(tmp_path / "a", 6)
    [restart] = [row for row in read_rows(tmp_path / "b/events.jsonl") if row["ev"] == "run.restart"]
    assert restart["restart"] == 1 and f"pid {victim}" in restart["error"]
    assert "restart 1 of 3" in said(tmp_path / "b")
