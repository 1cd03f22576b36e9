"""The contract of a server that generates tokens: the requests, the answers, and the transfer of weights to it.

A kind of server is one subclass of `TokenServer`. It knows the words of the wire; the engine knows none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unirl.types.sampling import ARSamplingParams


@dataclass(frozen=True)
class TokenRequest:
    """One response to be sampled."""

    id: str
    prompt: Sequence[int]
    """The tokens of the prompt."""
    seed: int
    """The seed of its random numbers, in [0, 2^31)."""


@dataclass(frozen=True)
class TokenAnswer:
    """One sampled response, as the server reports it."""

    tokens: Sequence[int]
    logps: Sequence[float] | None
    """Log-prob of each token, nats: log_softmax(logits / temperature) before top_k and top_p. None: not reported."""
    weights: str
    """The name of the weights that it was sampled from, as the server reports it."""


@dataclass(frozen=True)
class ProbeResult:
    """The difference between the server's logits and expected ones, on a fixed input."""

    absdiff: float
    """A bound on the largest absolute difference, nats; inf if there is none."""
    relative: float
    """`absdiff` divided by the root mean square of the expected logits."""


class TokenServer(ABC):
    """A server that samples tokens: a process that this one starts, or one that runs at an address."""

    name: ClassVar[str]
    """Its name in error messages."""
    concurrency: int
    """Number of requests that it gets at the same time."""

    @abstractmethod
    def start(self) -> None:
        """Begin to start the server, if it is to be started. Returns at once."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the server answers. Raises EngineError, with the end of its log, if it does not."""

    @abstractmethod
    def recover(self) -> None:
        """After a failed attempt: restart a server that has ended, with the weights that it had.

        Raises EngineError if it ends again and again, or if a server that this process did not start does not answer.
        """

    @abstractmethod
    def complete(self, request: TokenRequest, params: ARSamplingParams) -> TokenAnswer:
        """Sample one response, in one attempt.

        Raises:
            RequestFailed, ServerBusy: another attempt may succeed.
            EngineError: the server refuses the request, or its answer cannot be read.
        """

    @abstractmethod
    def begin_weights(self, name: str) -> None:
        """Begin a transfer of weights, which the server will have under this name."""

    @abstractmethod
    def send_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors of one bucket, by the names of the trained network. Their memory is reused afterwards."""

    @abstractmethod
    def end_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Make the server sample from the weights of the transfer.

        Returns:
            All tensors of the transfer as the server has them now, by the same names, read back.
        """

    @abstractmethod
    def probe(self, prompts: Sequence[Sequence[int]], logits: Tensor) -> ProbeResult:
        """Compare the server's logits after each prompt with `logits` [B, V]."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Load the weights again that the server had before it went to sleep."""

    @abstractmethod
    def stop(self) -> None:
        """End a server that this process started."""
