"""Restarts of a run inside one command, after a lost worker: from the newest checkpoint, as by a resume.

for attempt in attempts(recipe, session):
    with attempt, attempt.trainer(stop_on_signal) as trainer:
        trainer.train()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from unirl.config.errors import LostWorkerError, ResourceError, StallError, UniRLError
from unirl.config.failures import Restart, Session
from unirl.config.load import Recipe, load
from unirl.plan.machine import is_elsewhere
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer

OnSignal = Callable[[Callable[[int], None]], AbstractContextManager[None]]
"""Given what a stop signal does, the block in which it does that."""
RESTARTED = (LostWorkerError, StallError)
"""Errors after which a run starts again. Others would come again, or are for the user to judge."""


def attempts(recipe: Recipe, session: Session) -> Iterator[Attempt]:
    """The attempts at a run: the first one, and one after each error that allows a restart."""
    past: list[float] = []
    while True:
        attempt = Attempt(recipe, session, past)
        yield attempt
        if not attempt.restarts:
            return
        recipe = continued_run(recipe, session)


@dataclass
class Attempt:
    """One attempt, as a context: an error that allows a restart ends the block without being raised."""

    recipe: Recipe
    session: Session
    past: list[float]
    """When earlier restarts of this command began, by the monotonic clock."""
    is_stopping: bool = False
    """Set by a stop signal, after which nothing restarts."""
    restarts: bool = field(default=False, init=False)
    """True after an error that allows a restart."""

    @contextmanager
    def trainer(self, on_signal: OnSignal) -> Iterator[Trainer]:
        """The trainer of this attempt. A stop signal lets it finish its step, and keeps the run from starting again.

        Args:
            on_signal: `unirl.cli.signals.stop_on_signal`. Its handlers end before the trainer is closed.
        """
        with build_trainer(self.recipe, self.session) as trainer:

            def stop(signum: int) -> None:
                self.is_stopping = True
                trainer.request_stop(signum)

            with on_signal(stop):
                yield trainer

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        before = self.session.restart
        if isinstance(error, ResourceError) and before is not None:
            raise LostWorkerError(f"{before.error}\n  The run could not start again: {error}") from error
        if isinstance(error, RESTARTED) and not self.is_stopping and self.session.run_dir is not None:
            self.restarts = self._may_restart(error)
        return self.restarts

    def _may_restart(self, error: UniRLError) -> bool:
        allowed, now = self.recipe.config.restarts, time.monotonic()
        recent = [when for when in self.past if now - when < allowed.window_s]
        # A cluster that other programs share still counts a lost node among its own for a while.
        if allowed.max == 0 or is_elsewhere(self.recipe.config):
            return False
        if len(recent) >= allowed.max:
            raise type(error)(
                f"{error}\n  The run was restarted {len(recent)} times within {allowed.window_s:g} s "
                f"(restarts.window_s), and restarts.max={allowed.max} allows no more. It continues with resume=auto"
            ) from error
        self.past.append(now)
        self.session.restart = Restart(len(recent) + 1, allowed.max, str(error).splitlines()[0])
        return True


def continued_run(recipe: Recipe, session: Session) -> Recipe:
    """The recipe of the next attempt: in the folder of the run, from its newest checkpoint if it has any."""
    assert session.run_dir is not None, "an attempt without a run directory does not restart"
    overrides = [*recipe.composed.overrides, f"run.dir={session.run_dir}"]
    if CheckpointStore(session.run_dir / "checkpoints").checkpoints():
        overrides.append("resume=auto")
    return load(recipe.file.argument, overrides)
