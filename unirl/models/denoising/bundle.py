"""Contracts of a denoising model's components, and the bundle of a checkpoint that diffusers can load."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError
from unirl.models.base import Bundle, components_to_load
from unirl.models.denoising.stage import Denoiser, DiffusionStage
from unirl.models.loading.checkpoint import TOY, DiffusersFamily
from unirl.models.loading.estimate import ModelEstimate
from unirl.models.loading.hub import components as components_of
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.saved_weights import ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName
from unirl.types.sampling import DiffusionSamplingParams

CPU = torch.device("cpu")
VAE = "vae"


class TextEncoder(Protocol):
    """Encodes prompts into conditions with the frozen text encoders of one checkpoint."""

    components: tuple[str, ...]
    """The components of the bundle that `encode` runs."""

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """One row per text. Each row depends only on its text and on the length."""
        ...


@runtime_checkable
class MultimodalTextEncoder(TextEncoder, Protocol):
    """A text encoder that can read a prompt together with images."""

    def encode_with_images(self, texts: Sequence[str], max_sequence_length: int, images: Tensor) -> TextEmbedCondition:
        """One row per text and its images [B, N, 3, H, W] in [0, 1]. Each row depends only on its own inputs."""
        ...


class ConditionImageEncoder(Protocol):
    """Encodes the images of a prompt into conditions: the first frame of a video, or images to edit."""

    components: tuple[str, ...]
    """The components of the bundle that `encode` runs."""

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """One row per prompt from images [B, N, 3, H, W] in [0, 1], already scaled to the size of the sample."""
        ...


class Decoder(Protocol):
    """Decodes latents into pixels."""

    components: tuple[str, ...]

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] or [B, 3, F, H, W] in [0, 1], not rounded, from latents [B, *latent]; differentiable."""
        ...


class Encoder(Protocol):
    """Encodes pixels into latents."""

    components: tuple[str, ...]

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, *latent] fp32 from pixels [B, 3, H, W] in [0, 1]. Deterministic."""
        ...


class DiffusionBundle(Bundle):
    """A bundle of a denoising model. Each method builds one component that the pipeline uses."""

    facts: LatentFacts

    def stage(self) -> DiffusionStage:
        """The trained network as a policy that samples and replays trajectories."""
        return DiffusionStage(self.denoiser(), self.facts, self.dtype)

    @abstractmethod
    def denoiser(self) -> Denoiser:
        """The trained network as a velocity field."""

    @abstractmethod
    def text_encoder(self) -> TextEncoder:
        """The encoder of prompts."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """The decoder of latents."""

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The encoder of condition images. None if the model takes none."""
        return None

    def encoder(self) -> Encoder:
        """The encoder of pixels, used to train on recorded images. Raises IncompatibleError if there is none."""
        raise IncompatibleError(
            f"{type(self).__name__} has no encoder of images, so it cannot be trained on recorded images: implement "
            "`encoder()`, or let the policy sample its own images"
        )


class DiffusersBundle(DiffusionBundle):
    """The components of one checkpoint. Components that model_index.json does not name are absent."""

    toy: ClassVar[Mapping[str, object]] = {"path": TOY, "dtype": "fp32"}
    family: ClassVar[DiffusersFamily]

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            components: load only these and the trained ones. None loads all.
            path: a hub id, a directory in the diffusers layout, `toy` (tiny, random), or the name of a shipped model.
            revision: branch, tag or commit of a hub id.
            dtype: the compute dtype of transformer and encoders; the VAE is fp32.
            meta_init: leave the trained module without storage; its backend reads only the shards it needs.
        """
        self.path = path
        self.revision = revision
        self.configs = self.family.configs(path, revision)
        facts = self.family.facts(self.configs, batch_multiple(device))
        trained = tuple(name for name in self.family.trained if name in self.configs)
        frozen = tuple(name for name in self.configs.components if name not in trained)
        wanted = components_to_load(components, (facts.trainable_attr, *frozen), facts.trainable_attr)
        self.dtype = TORCH_DTYPES[dtype]
        with quiet_libraries():
            parts = {name: self._empty(name) if meta_init else self._load(name) for name in trained}
            modules = {facts.trainable_attr: self.assemble(parts)}
            modules |= {name: self._load(name) for name in wanted if name in frozen}
            self.tokenizers = self._load_tokenizers() if set(modules) - {facts.trainable_attr, VAE} else {}
        super().__init__(modules, facts, dtype=self.dtype, device=device)

    def assemble(self, parts: Mapping[str, nn.Module]) -> nn.Module:
        """The trained module, made of the trained components. If there are several, their names become prefixes."""
        [module] = parts.values()
        return module

    # Facts without loading the model

    @classmethod
    def facts_of(cls, path: str, revision: str | None = None, device: torch.device = CPU) -> LatentFacts:
        """The facts of a model that is not loaded, from its configuration files."""
        return cls.family.facts(cls.family.configs(path, revision), batch_multiple(device))

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts of a model that is not loaded."""
        return cls.family.estimate(path, revision)

    # Weights

    def saved(self) -> SavedWeights:
        """The trained weights as the checkpoint stores them, readable row by row."""
        if self.family.is_toy(self.path):
            return ModuleWeights(self.untrained())
        return self.saved_part(self.facts.trainable_attr)

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        """The trained weights of another checkpoint of this family, read row by row."""
        other = copy(self)
        other.path, other.revision, other.configs = path, revision, self.family.configs(path, revision)
        return other.saved()

    def saved_part(self, component: str) -> SavedWeights:
        """The weights of a component in the checkpoint's directory, by their own names."""
        return SafetensorsWeights(self.family.directory(self.path, self.revision) / component, self.dtype)

    def untrained(self) -> nn.Module:
        """A second copy of the trained module on the CPU, with the checkpoint's own weights."""
        with quiet_libraries():
            parts = {name: self._load(name) for name in self.family.trained if name in self.configs}
        return self.assemble(parts).requires_grad_(False).eval()

    def trained_parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """The networks that `assemble` joined, by component name."""
        return {self.facts.trainable_attr: module}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """`untrained` with `tensors` in place of its own. Raises ValueError for a name that it does not have."""
        module = self.untrained()
        unexpected = module.load_state_dict(dict(tensors), strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the trained module has no parameter {unexpected[0]!r} ({len(unexpected)} unknown names)")
        return module

    def require(self, names: Sequence[str], task: str) -> None:
        """Raise ValueError if components that `task` needs were not loaded."""
        missing = [name for name in names if name not in self.modules]
        if missing:
            raise ValueError(f"this bundle was built without {', '.join(missing)}, so it cannot {task}")

    def _load(self, name: str) -> nn.Module:
        dtype = torch.float32 if name == VAE else self.dtype
        if self.family.is_toy(self.path):
            return self.family.random(self.configs, name, dtype)
        return self.family.load(self.family.directory(self.path, self.revision), name, dtype)

    def _empty(self, name: str) -> nn.Module:
        return self.family.build_empty(self.configs, name).to(self.dtype)

    def _load_tokenizers(self) -> dict[str, Any]:
        if self.family.is_toy(self.path):
            return dict(self.family.toy_tokenizers())
        from transformers import AutoProcessor, AutoTokenizer

        root = self.family.directory(self.path, self.revision)
        names = [name for name in self.family.tokenizers if name in components_of(root)]
        readers = {name: AutoProcessor if "processor" in name else AutoTokenizer for name in names}
        return {name: reader.from_pretrained(root / name) for name, reader in readers.items()}


def batch_multiple(device: torch.device) -> int:
    """Forward batches are padded to a multiple of this: on a CPU, a row has the same bits in any multiple of 4."""
    return 4 if device.type == "cpu" else 1
