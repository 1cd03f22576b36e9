"""The contract of the servers of engines: a process that samples, and the transfer of weights to it.

A kind of server is one subclass of `TokenServer` (tokens.py) or `LatentServer` (latents.py). It knows the words of the
wire; the engine knows none of them.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

from torch import Tensor

from unirl.config.errors import EngineError
from unirl.config.http import MAX_PAUSE_S, RequestFailed, ServerBusy
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.rollout.engine.serving.in_flight import InFlight

MAX_ATTEMPTS = 5
"""Attempts at one request before the run stops."""
RETRY_DELAY_S = 0.2
AnswerT = TypeVar("AnswerT")


class Server(ABC):
    """A server that samples: a process that this one starts, or one that runs at an address."""

    name: ClassVar[str]
    """Its name in error messages."""
    in_flight_modes: ClassVar[tuple[InFlight, ...]] = ("drain",)
    """The values of `rollout.in_flight` that it can carry out."""
    concurrency: int
    """Number of requests that it gets at the same time."""

    @abstractmethod
    def prepare(self, layout: WeightLayout) -> None:
        """Learn what will be sent, before the start. Raises SyncError, naming the tensor, for what it cannot take."""

    @abstractmethod
    def start(self) -> None:
        """Start the server, if it is to be started and does not run yet, and wait until it answers.

        Raises:
            EngineError: with the end of its log, if it does not answer.
            IncompatibleError: it runs with other settings than those of the recipe.
        """

    @abstractmethod
    def recover(self) -> None:
        """After a failed attempt: restart a server that has ended, with the weights that it had.

        Raises:
            EngineError: it ends again and again, or a server that this process did not start does not answer.
            WeightsLostError: it was restarted, and the weights must be sent again.
        """

    def interrupt(self, in_flight: InFlight) -> None:
        """Abort or pause the running requests before a transfer, and let new ones wait until `proceed`."""
        raise AssertionError(f"{self.name} does neither: its engine refuses the setting")

    def proceed(self) -> None:
        """Go on after `interrupt`."""
        raise AssertionError(f"{self.name} does neither: its engine refuses the setting")

    @abstractmethod
    def begin_weights(self, name: str) -> None:
        """Begin a transfer of weights, which the server will have under this name."""

    @abstractmethod
    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors of one bucket, by the names of the trained network. Their memory is reused afterwards."""

    @abstractmethod
    def end_weights(self) -> Mapping[str, Fingerprint] | None:
        """Make the server sample from the weights of the transfer.

        Returns:
            The fingerprints of all tensors of the transfer as the server has them now, by the same names, read back.
            None if it cannot be asked for them.

        Raises:
            SyncError: the server reports that it has other weights.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of the device."""

    @abstractmethod
    def wake_up(self) -> None:
        """Bring back the weights that the server had before it went to sleep."""

    @abstractmethod
    def stop(self) -> None:
        """End a server that this process started."""

    def insist(self, what: str, attempt: Callable[[], AnswerT]) -> AnswerT:
        """The result of `attempt`, after retries of attempts that failed or found the server busy.

        Args:
            what: the subject of the message, such as `for r0:1`.

        Raises:
            EngineError: all attempts failed.
        """
        delay = RETRY_DELAY_S
        for count in range(1, MAX_ATTEMPTS + 1):
            try:
                return attempt()
            except (RequestFailed, ServerBusy) as error:
                if count == MAX_ATTEMPTS:
                    raise EngineError(
                        f"{self.name} gave no answer {what} in {count} attempts; the last one: {error}"
                    ) from error
                wanted = error.retry_after_s if isinstance(error, ServerBusy) else delay * random.uniform(0.5, 1.0)
                time.sleep(min(wanted, MAX_PAUSE_S))
                delay *= 2
                self.recover()
        raise AssertionError("the loop returns or raises")
