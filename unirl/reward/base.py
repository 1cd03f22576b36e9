"""The contract of a reward scorer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from unirl.config.errors import RewardError
from unirl.distributed.group.rank import own_device
from unirl.types.device import CPU, move_module
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class ScorerCost:
    """The cost of a scorer, for plans."""

    parameters: int = 0
    """Parameters of its network, in float32."""
    flops: float = 0.0
    """Operations for one sample."""

    def on_frames(self, count: int) -> ScorerCost:
        """The cost of scoring so many images of one sample."""
        return replace(self, flops=count * self.flops)


CLIP_L = ScorerCost(parameters=428_000_000, flops=0.18e12)
CLIP_H = ScorerCost(parameters=986_000_000, flops=0.38e12)
"""CLIP ViT-L-14 and ViT-H-14 on one image (304M and 632M parameters, 257 tokens) and its prompt (77 tokens)."""


class RewardScorer(ABC):
    """Scores the rows of a request. The score of a row depends on that row alone."""

    reads: tuple[str, ...]
    """Columns of the request that the scorer needs: prompts, images, videos, texts, lengths, episodes, sources,
    metadata. The other columns are None."""
    reads_levels: bool = False
    """True: `score` takes images and videos as uint8, as they are stored, and converts the rows that it works on.
    False: it gets all of them as floats in [0, 1], which need four times the memory."""
    capabilities: Capabilities = Capabilities(modalities=("image",))
    cost: ClassVar[ScorerCost | None] = ScorerCost()
    """The cost of this scorer without its parts, for plans. None: not known."""
    parts: Sequence[RewardScorer] = ()
    """The scorers that this one calls."""

    @abstractmethod
    def score(self, request: RewardRequest) -> RewardResponse:
        """Returns finite component scores [B] and their total [B], float32, in the order of the request.

        Raises:
            RewardError: a row cannot be scored; the message names its sample id. A failure is never returned as 0.
        """

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the total of `score` [B], differentiable in images [B, 3, H, W] in [0, 1] that are not rounded.

        A scorer that implements it declares `Capabilities.differentiable`.
        """
        name = type(self).__name__
        raise RewardError(f"reward {name!r} has no gradient: give it `objective(images, prompts)`, or choose another")

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        """Raises RewardError when the prompt lacks something without which none of its samples could be scored.

        `unirl check`, `unirl data check` and the start of a run call it with every prompt, before a model is loaded.
        """
        for scorer in self.parts:
            scorer.check_prompt(prompt, metadata)

    def check_start(self) -> None:
        """Raises an error with the way out when a server or a package that the scorer needs is not there.

        A run calls it before it makes a folder or loads a model, and so does `unirl doctor RECIPE`.
        """
        for scorer in self.parts:
            scorer.check_start()

    def offload(self) -> None:
        """Moves the scorer's weights off the device between reward phases."""
        for scorer in self.parts:
            scorer.offload()

    def onload(self) -> None:
        """Moves the scorer's weights back to the device."""
        for scorer in self.parts:
            scorer.onload()


ModelT = TypeVar("ModelT", bound=nn.Module)


class LocalRewardBackend(RewardScorer, Generic[ModelT]):
    """A scorer with a network, which is built on first use and can move between the device and the CPU."""

    cost: ClassVar[ScorerCost | None] = None

    def __init__(self, *, device: Device = "auto") -> None:
        self.device = own_device() if device == "auto" else torch.device(device)
        self._model: ModelT | None = None

    @abstractmethod
    def load_model(self) -> ModelT:
        """Returns the network on the CPU. Heavy libraries are imported here."""

    @property
    def model(self) -> ModelT:
        """The network on the device, in eval mode, with frozen weights."""
        if self._model is None:
            self._model = self.load_model().eval().requires_grad_(False).to(self.device)
        return self._model

    def offload(self) -> None:
        if self._model is not None:
            move_module(self._model, CPU)

    def onload(self) -> None:
        if self._model is not None:
            move_module(self._model, self.device)


def single(name: str, scores: Tensor) -> RewardResponse:
    """Returns the response of a scorer whose only component is its total."""
    scores = scores.detach().float().cpu()
    return RewardResponse(total=scores, components={name: scores})
