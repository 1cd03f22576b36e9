"""Rows from other worker processes through Ray's object store: from worker to worker, never through the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from unirl.config.errors import StallError, WorkerError
from unirl.distributed.tensor.packing import unpack
from unirl.distributed.tensor.transport import RowPayload
from unirl.types.remote_rows import StoredRows


class RayTransport:
    """Asks the owner's actor, whose `read(pieces)` answers with `RowStore.read` beside the call it is busy with."""

    def __init__(self, deadline_s: float) -> None:
        """
        Args:
            deadline_s: how long an owner may take to answer.
        """
        self.deadline_s = deadline_s
        self.actors: dict[str, Any] = {}

    def fetch(self, wanted: Mapping[str, Sequence[StoredRows]]) -> dict[str, list[RowPayload]]:
        """The rows of the pieces of each owner.

        Raises:
            WorkerError: an owner is dead.
            StallError: an owner does not answer in time.
            LookupError: the step of the rows has been released.
        """
        answers = {owner: self._actor(owner).read.remote(list(pieces)) for owner, pieces in wanted.items()}
        end = monotonic() + self.deadline_s
        return {owner: self._answer(owner, answer, end) for owner, answer in answers.items()}

    def _actor(self, owner: str) -> Any:
        """The actor of a worker, which has the worker's name."""
        import ray

        if owner not in self.actors:
            try:
                self.actors[owner] = ray.get_actor(owner)
            except ValueError as error:
                raise WorkerError(f"worker {owner!r}, which owns rows of this step, is gone: resume the run") from error
        return self.actors[owner]

    def _answer(self, owner: str, answer: Any, end: float) -> list[RowPayload]:
        import ray
        from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        try:
            payloads: list[RowPayload] = ray.get(answer, timeout=max(end - monotonic(), 0.0))
        except GetTimeoutError as error:
            raise StallError(f"worker {owner!r} did not send its rows within {self.deadline_s:g} s") from error
        except (RayActorError, ObjectLostError) as error:
            raise WorkerError(f"worker {owner!r} died before it sent its rows: resume the run ({error})") from error
        except RayTaskError as error:
            raise error.cause from error
        return [RowPayload(unpack(payload.value), payload.on_accelerator) for payload in payloads]
