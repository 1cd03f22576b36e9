"""The contract of a reward scorer."""

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
    """Scores the rows of a request. The score of a row depends on that row alone."""

    reads: tuple[str, ...]
    """Columns of the request that the scorer needs: prompts, images, videos, texts, lengths, sources, metadata.
    The other columns are None."""
    capabilities: Capabilities = Capabilities(modalities=("image",))

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResponse:
        """Returns finite component scores [B] and their total [B], float32, in the order of the request.

        Raises:
            RewardError: a row cannot be scored; the message names its sample id. A failure is never returned as 0.
        """

    def offload(self) -> None:  # noqa: B027 - most scorers hold no memory worth moving
        """Moves the scorer's weights off the device between reward phases."""

    def onload(self) -> None:  # noqa: B027
        """Moves the scorer's weights back to the device."""


@runtime_checkable
class DifferentiableScorer(Protocol):
    """An image scorer whose score has a gradient. It declares `Capabilities.differentiable`."""

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the total of `score` [B], differentiable in images [B, 3, H, W] in [0, 1] that are not rounded."""
        ...


@runtime_checkable
class PromptChecker(Protocol):
    """A scorer that can tell from a prompt and its metadata that no sample of this prompt could be scored.

    The start of a run and `unirl data check` call it with every prompt.
    """

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raises RewardError when the prompt lacks something that the scorer needs."""
        ...


@runtime_checkable
class StartChecker(Protocol):
    """A scorer that depends on a server. A run checks the server before it loads a model."""

    def check_start(self) -> None:
        """Raises RewardError or ConfigError, with the way out, when the server cannot score anything."""
        ...


class LocalRewardBackend(RewardScorer):
    """A scorer with a network, which is built on first use and can move between the device and the CPU."""

    toy: ClassVar[dict[str, object]] = {}

    def __init__(self, *, device: Device = "auto") -> None:
        self.device = resolve_device(device)
        self._model: nn.Module | None = None

    @abstractmethod
    def load_model(self) -> nn.Module:
        """Returns the network on the CPU. Heavy libraries are imported here."""

    @property
    def model(self) -> nn.Module:
        """The network on the device, in eval mode, with frozen weights."""
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
    """Returns the device of that name; `auto` is CUDA where it is available, otherwise the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def single(name: str, scores: Tensor) -> RewardResponse:
    """Returns the response of a scorer whose only component is its total."""
    scores = scores.detach().float().cpu()
    return RewardResponse(total=scores, components={name: scores})
