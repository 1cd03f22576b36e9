"""The modules of one checkpoint, and which of them are on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError
from unirl.models.canary import CanaryAnswer
from unirl.models.denoising.stage import Denoiser, DiffusionStage
from unirl.models.loading.saved_weights import SavedWeights
from unirl.types.batch import Batch
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts, ModelFacts
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams


class Stage(Protocol):
    """What every policy has, of whatever domain. How it samples and replays is its domain's own contract."""

    autocast_dtype: torch.dtype
    """The compute dtype of the network."""

    def canary(self, inputs: Any) -> CanaryAnswer:
        """The network's answer to its pipeline's `canary_inputs`, which are on its device."""
        ...


class Bundle(ABC):
    """One checkpoint: modules by component name, of which `facts.trainable_attr` is trained, the others frozen.

    Backends change the trained module in place (adapters, sharding), so every holder of the bundle sees the same
    weights. It may be on the meta device: then it has no storage until a backend fills it from `saved()`.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], facts: ModelFacts, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.modules = dict(modules)
        self.facts = facts
        self.dtype = dtype
        """The compute dtype of the network; a backend may keep trained parameters wider."""
        self.device = device
        for module in self.modules.values():
            module.eval().requires_grad_(False)
            if not next(module.parameters()).is_meta:
                module.to(device)
        self.trainable().requires_grad_(True)

    def trainable(self) -> nn.Module:
        """The module that is trained."""
        return self.modules[self.facts.trainable_attr]

    @abstractmethod
    def stage(self) -> Stage:
        """The trained network as a policy that samples and replays; it needs no other component."""

    def saved(self) -> SavedWeights:
        """The trained module's own weights in the checkpoint, read row by row."""
        raise NotImplementedError(f"{type(self).__name__} cannot fill a module that was built without storage")

    @property
    def frozen(self) -> tuple[str, ...]:
        """Component names of everything that is not trained: encoders, VAE."""
        return tuple(name for name in self.modules if name != self.facts.trainable_attr)

    def offload(self, names: Sequence[str]) -> None:
        """Move components to main memory."""
        self._move(names, torch.device("cpu"))

    def onload(self, names: Sequence[str]) -> None:
        """Move components to the bundle's device."""
        self._move(names, self.device)

    @contextmanager
    def resident(self, names: Sequence[str]) -> Iterator[None]:
        """Have components on the device inside, and where they were afterwards."""
        before = {name: _device_of(self.modules[name]) for name in names}
        self.onload(names)
        try:
            yield
        finally:
            for name, device in before.items():
                self._move([name], device)

    def _move(self, names: Sequence[str], device: torch.device) -> None:
        for name in names:
            if name not in self.modules:
                raise ValueError(f"the bundle has no component {name!r}; it has {sorted(self.modules)}")
            if _device_of(self.modules[name]) != device:
                self.modules[name].to(device)


def chosen(components: Sequence[str] | None, all_names: Sequence[str], trained: str) -> tuple[str, ...]:
    """The components to load, in the checkpoint's order: those that are named and the trained one; absent = all."""
    if components is None:
        return tuple(all_names)
    unknown = [name for name in components if name not in all_names]
    if unknown:
        raise ValueError(f"the checkpoint has no component {unknown[0]!r}; it has {', '.join(all_names)}")
    return tuple(name for name in all_names if name in components or name == trained)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


class Pipeline(Protocol):
    """A request in, a response out, with one bundle: what engines ask, of whatever domain."""

    capabilities: ClassVar[Capabilities]
    """What it makes: its modalities."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def stage(self) -> Stage: ...

    @property
    def facts(self) -> ModelFacts: ...

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """The rollout of a request whose sampling is pinned, at most about `chunk_size` rows at a time."""
        ...

    def canary_inputs(self) -> Batch:
        """What two networks are asked that should hold the same weights."""
        ...

    def offload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to main memory."""
        ...

    def onload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to its device."""
        ...


class TextEncoder(Protocol):
    """Prompts to conditions, by the frozen encoders of one checkpoint."""

    components: tuple[str, ...]
    """The bundle's components that `encode` runs."""

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """One row per text; a pure function of each text and the length."""
        ...


@runtime_checkable
class MultimodalTextEncoder(TextEncoder, Protocol):
    """An encoder that reads a prompt together with its images."""

    def encode_with_images(self, texts: Sequence[str], max_sequence_length: int, images: Tensor) -> TextEmbedCondition:
        """One row per text; a pure function of each text, the length and its images [B, N, 3, H, W] in [0, 1]."""
        ...


class ConditionImageEncoder(Protocol):
    """Condition images to what the network reads of them: a video's first frame, images to be edited."""

    components: tuple[str, ...]
    """The bundle's components that `encode` runs."""

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """One row per prompt, each by itself, of images [B, N, 3, H, W] in [0, 1] of the sample's size."""
        ...


class Decoder(Protocol):
    """Latents to pixels."""

    components: tuple[str, ...]

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, *latent] to pixels [B, 3, H, W] or [B, 3, F, H, W] in [0, 1], not rounded; differentiable."""
        ...


class Encoder(Protocol):
    """Pixels to latents."""

    components: tuple[str, ...]

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1] to the latents [B, *latent] fp32 that the network is trained on; no chance."""
        ...


class DiffusionBundle(Bundle):
    """A bundle of a denoising model: what its pipeline is made of."""

    facts: LatentFacts

    def stage(self) -> DiffusionStage:
        """The trained network as a velocity field that samples and replays."""
        return DiffusionStage(self.denoiser(), self.facts, self.dtype)

    @abstractmethod
    def denoiser(self) -> Denoiser:
        """The trained network as a velocity field."""

    @abstractmethod
    def text_encoder(self) -> TextEncoder:
        """Prompts to conditions."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Latents to pixels."""

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """Condition images to what the network reads of them; None where it takes none."""
        return None

    def encoder(self) -> Encoder:
        """Pixels to latents, for images that were recorded. Raises ConfigError (2020) where the family has none."""
        raise IncompatibleError(
            f"{type(self).__name__} brings no encoder of images, so it cannot be trained on recorded ones: give it "
            "`encoder()`, or let the policy draw its samples"
        )
