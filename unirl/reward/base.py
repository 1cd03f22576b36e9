"""The contract of a scorer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

Device = Literal["auto", "cpu", "cuda"]


class RewardScorer(ABC):
    """Scores the rows of a request, each by itself: neither order nor neighbours matter."""

    reads: tuple[str, ...]
    """The columns it gets, of: prompts, images, videos, texts, lengths, sources, metadata."""
    capabilities: Capabilities = Capabilities(modalities=("image",))

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResponse:
        """Finite component scores [B] and their total [B], float32, in the order of the request.

        A row that cannot be scored raises RewardError naming its sample id; it never becomes a zero.
        """

    def offload(self) -> None:  # noqa: B027 - most scorers hold no memory worth moving
        """Leave the device between reward phases."""

    def onload(self) -> None:  # noqa: B027
        """The inverse of `offload`."""


@runtime_checkable
class DifferentiableScorer(Protocol):
    """A scorer of pictures that a policy can be trained through; it declares `Capabilities.differentiable`."""

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the total of `score`, with its gradient with respect to images [B, 3, H, W] in [0, 1], not rounded."""
        ...


@runtime_checkable
class PromptChecker(Protocol):
    """A scorer that knows from a prompt alone when none of its samples could be scored: something it needs is missing.

    It is asked of every prompt when a run starts, and by `unirl data check`.
    """

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError saying what is missing."""
        ...


@runtime_checkable
class StartChecker(Protocol):
    """A scorer that asks something elsewhere: whether that is there is found out before a run loads anything."""

    def check_start(self) -> None:
        """Raises RewardError or ConfigError, with the way out, when nothing could be scored."""
        ...


class LocalRewardBackend(RewardScorer):
    """A scorer around a network, which is built on first use and moves between the device and the CPU."""

    toy: ClassVar[dict[str, object]] = {}

    def __init__(self, *, device: Device = "auto") -> None:
        self.device = resolve_device(device)
        self._model: nn.Module | None = None

    @abstractmethod
    def load_model(self) -> nn.Module:
        """The network on the CPU; heavy libraries are imported here."""

    @property
    def model(self) -> nn.Module:
        """The network on the device, in eval mode and without gradients."""
        if self._model is None:
            self._model = self.load_model().eval().requires_grad_(False).to(self.device)
        return self._model

    def offload(self) -> None:
        if self._model is not None:
            self._model.to("cpu")

    def onload(self) -> None:
        if self._model is not None:
            self._model.to(self.device)


def resolve_device(device: Device) -> torch.device:
    """The accelerator if there is one (`auto`), else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def single(name: str, scores: Tensor) -> RewardResponse:
    """The answer of a scorer with one component, which is the total."""
    scores = scores.detach().float().cpu()
    return RewardResponse(total=scores, components={name: scores})
