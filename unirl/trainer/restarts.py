"""Restarts of a run inside one command, after a lost worker: from the newest checkpoint, as by a resume.

for attempt in attempts(recipe, session):
    with attempt, attempt.trainer(stop_on_signal) as trainer:
        trainer.train()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from unirl.config.errors import (
    ConfigError,
    LostWorkerError,
    MemoryShortageError,
    ResourceError,
    StallError,
    UniRLError,
)
from unirl.config.failures import Restart, Session
from unirl.config.load import Recipe, load
from unirl.plan.machine import is_elsewhere
from unirl.plan.preflight import preflight
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer

POLL_S = 2.0
OnSignal = Callable[[Callable[[int], None]], AbstractContextManager[None]]
"""Given what a stop signal does, the block in which it does that."""
RESTARTED = (LostWorkerError, StallError)
"""Errors after which a run starts again. Others would come again, or are for the user to judge."""


def attempts(recipe: Recipe, session: Session) -> Iterator[Attempt]:
    """The attempts at a run: the first one, and one after each error that allows a restart."""
    past: list[float] = []
    following: Recipe | None = recipe
    while following is not None:
        attempt = Attempt(following, session, past)
        yield attempt
        following = attempt.following


@dataclass
class Attempt:
    """One attempt, as a context: an error that allows a restart ends the block without being raised."""

    recipe: Recipe
    session: Session
    past: list[float]
    """When the restarts of this command began, by the monotonic clock."""
    is_stopping: bool = False
    """Set by a stop signal, after which nothing restarts."""
    following: Recipe | None = field(default=None, init=False)
    """The recipe of the next attempt, after an error that allows a restart."""

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
        if self.is_stopping or self.session.run_dir is None:
            return False
        if self.recipe.config.runtime_in_use == "torchrun":  # only torchrun can start a process again
            return False
        if isinstance(error, RESTARTED):
            self.following = self._restart(error, self.session.run_dir)
        elif isinstance(error, ResourceError) and self.session.restart is not None:
            self.following = self._with_what_is_left(error, self.session.restart, self.session.run_dir)
        return self.following is not None

    def _restart(self, error: UniRLError, run_dir: Path) -> Recipe | None:
        """The recipe of the next attempt. None: the error ends the run."""
        allowed, now = self.recipe.config.restarts, time.monotonic()
        recent = [when for when in self.past if now - when < allowed.window_s]
        if allowed.max == 0:
            return None
        if len(recent) >= allowed.max:
            raise type(error)(
                f"{error}\n  The run was restarted {len(recent)} times within {allowed.window_s:g} s "
                f"(restarts.window_s), and restarts.max={allowed.max} allows no more. It continues with resume=auto"
            ) from error
        self.past.append(now)
        reason = str(error).splitlines()[0]
        self.session.restart = Restart(len(recent) + 1, allowed.max, reason, self.recipe.config.num_devices)
        return continued_run(self.recipe, run_dir)

    def _with_what_is_left(self, error: ResourceError, restart: Restart, run_dir: Path) -> Recipe:
        """The recipe of the next attempt after the cluster lacked devices for one: the same, or one on fewer devices.

        Raises:
            LostWorkerError: neither may go on.
        """
        config = self.recipe.config
        # A cluster that goes on still counts a lost machine among its own for a while, or may get another one.
        if is_elsewhere(config) and time.monotonic() - self.past[-1] < config.restarts.wait_s:
            time.sleep(POLL_S)
            return continued_run(self.recipe, run_dir)
        fewest = config.restarts.min_devices
        smaller = None if fewest is None else on_fewer_devices(self.recipe, run_dir, fewest)
        if smaller is None:
            way_out = (
                "restarts.min_devices is not set, with which it would go on with fewer"
                if fewest is None
                else f"No smaller num_devices from restarts.min_devices={fewest} on suits the recipe"
            )
            raise LostWorkerError(f"{restart.error}\n  The run could not start again: {error}. {way_out}") from error
        self.session.restart = replace(restart, num_devices=smaller.config.num_devices)
        return smaller


def continued_run(recipe: Recipe, run_dir: Path, *changes: str) -> Recipe:
    """The recipe of the next attempt: in the folder of the run, from its newest checkpoint if it has any."""
    overrides = [*recipe.composed.overrides, f"run.dir={run_dir}", *changes]
    if CheckpointStore(run_dir / "checkpoints").checkpoints():
        overrides.append("resume=auto")
    return load(recipe.file.argument, overrides)


def on_fewer_devices(recipe: Recipe, run_dir: Path, fewest: int) -> Recipe | None:
    """The recipe of the next attempt on as many devices as its checks allow, below those of `recipe`.

    The checks are those of a start: the counts of samples divide, device sets exist, the memory suffices.
    """
    for num_devices in range(recipe.config.num_devices - 1, fewest - 1, -1):
        with suppress(ConfigError, MemoryShortageError):
            smaller = continued_run(recipe, run_dir, f"num_devices={num_devices}")
            preflight(smaller)
            return smaller
    return None
