"""A checkpoint that is written and published while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from unirl.config.errors import StallError, UniRLError, WorkerError
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.state import is_written
from unirl.train.backend.writer import PROGRESS_S
from unirl.types.progress import progress

POLL_S = 0.02
LOST = (WorkerError, StallError)
"""Errors after which no worker can be asked whether it has written its files."""


@dataclass
class BackgroundSave:
    """A save whose state is copied. A thread of the driver publishes it when every file of every rank is whole."""

    step: int
    staged: ExitStack
    """Publishes the checkpoint when it is closed, and removes the unfinished one when it is closed by an error."""
    folders: Sequence[Path]
    """The folders that the backends write."""
    backends: Sequence[TrainBackend]
    copy: Callable[[], UniRLError | None] = lambda: None
    """Copies the published checkpoint elsewhere. Returns the error if that failed."""
    outcome: Future[UniRLError | None] = field(default_factory=Future)
    is_copying: bool = False
    """True when the checkpoint is published and is being copied elsewhere."""
    failure: BaseException | None = None
    """Set when the files will never be whole."""

    def start(self) -> BackgroundSave:
        Thread(target=self._publish, name="checkpoint-publisher", daemon=True).start()
        return self

    def is_published(self) -> bool:
        """True if the checkpoint is published. Raises the error of a save that failed."""
        if not self.outcome.done():
            self._ask_backends(wait=False)
        if self.failure is None and not self.outcome.done():
            return False
        self.outcome.result()
        return True

    def finish(self) -> UniRLError | None:
        """Wait until the checkpoint is published and copied, and return the error of the copy if that failed.

        Raises the error of a save that could not be published.
        """
        if not self.outcome.done():
            self._ask_backends(wait=True)
        while not self.outcome.done():
            wait([self.outcome], PROGRESS_S)
            if self.is_copying:  # the file systems of fsspec have time limits of their own
                progress("wait for the copy of a checkpoint")
        return self.outcome.result()

    def leave(self, error: BaseException) -> None:
        """Finish the save of a run that ends by `error`. A save that cannot be finished leaves no files."""
        if isinstance(error, LOST):
            self.failure = error
        else:
            self._ask_backends(wait=True)
        with suppress(Exception):  # `error` is what ended the run
            self.outcome.result()

    def _ask_backends(self, wait: bool) -> None:
        try:
            for backend in self.backends:
                backend.finish_save(wait)
        except Exception as error:  # the publisher raises it within the store, which explains errors of the disk
            self.failure = error

    def _publish(self) -> None:
        try:
            with self.staged:
                while not all(is_written(folder) for folder in self.folders):
                    if self.failure is not None:
                        raise self.failure
                    time.sleep(POLL_S)
            self.is_copying = True
            self.outcome.set_result(self.copy())
        except BaseException as error:  # raised again in the driver's own thread
            self.outcome.set_exception(error)
