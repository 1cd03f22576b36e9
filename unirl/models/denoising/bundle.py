"""Contracts of a denoising model's components, and the bundle of a checkpoint that diffusers can load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError
from unirl.models.base import Bundle, components_to_load
from unirl.models.chunks import batch_multiple
from unirl.models.denoising.norms import fuse_norms
from unirl.models.denoising.stage import Denoiser, DiffusionStage
from unirl.models.loading.adapter_sources import (
    AdapterLayers,
    adapter_file,
    has_peft_config,
    read_peft,
    read_with_diffusers,
)
from unirl.models.loading.checkpoint import TOY, VAE, DiffusersFamily
from unirl.models.loading.completeness import replace_tensors
from unirl.models.loading.dtypes import cast_module, compute_dtype, dtype_in
from unirl.models.loading.estimate import DecodingCost, ModelEstimate
from unirl.models.loading.hub import components as components_of
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.lora import adapted_layers
from unirl.models.loading.saved_weights import ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.types.conditions import Conditions, TextCondition, TextEmbedCondition
from unirl.types.device import CPU
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName, VaeDtype
from unirl.types.sampling import DiffusionSamplingParams


class UsesComponents(Protocol):
    """Runs components of a bundle."""

    @property
    def components(self) -> tuple[str, ...]:
        """The components of the bundle that it runs. They must be on the device."""


class TextEncoder(UsesComponents, Protocol):
    """Encodes prompts into conditions with the frozen text encoders of one checkpoint, or only with its tokenizer."""

    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextCondition:
        """One row per text. Each row depends only on its text and on the length."""


@runtime_checkable
class MeasuringTextEncoder(TextEncoder, Protocol):
    """A text encoder that can say which prompts are too long for it. It reads their beginning alone."""

    def cuts(self, texts: Sequence[str], max_sequence_length: int) -> list[bool]:
        """True for each text of which `encode` leaves out tokens in the encoder that reads the longest texts."""


@runtime_checkable
class MultimodalTextEncoder(TextEncoder, Protocol):
    """A text encoder that can read a prompt together with images."""

    def encode_with_images(self, texts: Sequence[str], max_sequence_length: int, images: Tensor) -> TextEmbedCondition:
        """One row per text and its images [B, N, 3, H, W] in [0, 1]. Each row depends only on its own inputs."""


class ConditionImageEncoder(UsesComponents, Protocol):
    """Encodes the images of a prompt into conditions: the first frame of a video, or images to edit."""

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """One row per prompt from images [B, N, 3, H, W] in [0, 1], already scaled to the size of the sample."""


class Decoder(UsesComponents, Protocol):
    """Decodes latents into pixels."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] or [B, 3, F, H, W] in [0, 1], not rounded, from latents [B, *latent]; differentiable."""


class Encoder(UsesComponents, Protocol):
    """Encodes pixels into latents."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents [B, *latent] fp32 from pixels [B, 3, H, W] in [0, 1]. Deterministic."""


class NetworkDenoiser(ABC):
    """Base of the denoisers that adapt one network of diffusers."""

    matrix: ClassVar[str]
    """Name of a parameter with the dtype of the network's matrices. Norms and tables may have a wider one."""
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """Names of the network's lists of blocks that read the noise level, in the order in which a forward calls them."""

    def __init__(self, network: nn.Module, facts: LatentFacts) -> None:
        fuse_norms(network)
        self.network = network
        self.facts = facts
        self.timestep_scale = facts.timestep_scale

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the network's matrices compute, which is that of its inputs."""
        return compute_dtype(self.network, self.matrix)

    def block_chains(self) -> list[list[nn.Module]]:
        return [self.chain_of(self.network)]

    def chain_of(self, network: nn.Module) -> list[nn.Module]:
        """The blocks of `block_lists` in `network`, in the order in which a forward calls them."""
        return [block for name in self.block_lists for block in network.get_submodule(name).children()]

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, *latent] fp32 at x [B, *latent] fp32 and sigma [B] fp32, given `text` and the family's conditions."""


class LatentBundle(Bundle):
    """A bundle of a model whose samples are latents, which a decoder turns into pixels."""

    facts: LatentFacts

    @abstractmethod
    def stage(self) -> DiffusionStage:
        """The trained network as a policy that samples and replays trajectories."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """The decoder of latents."""

    def encoder(self) -> Encoder:
        """The encoder of pixels, used to train on recorded images. Raises IncompatibleError if there is none."""
        raise IncompatibleError(
            f"{type(self).__name__} has no encoder of images, so it cannot be trained on recorded images: implement "
            "`encoder()`, or let the policy sample its own images"
        )

    def require(self, names: Sequence[str], task: str) -> list[nn.Module]:
        """The components that `task` needs, in order. Raises ValueError if some were not loaded."""
        missing = [name for name in names if name not in self.modules]
        if missing:
            raise ValueError(f"this bundle was built without {', '.join(missing)}, so it cannot {task}")
        return [self.modules[name] for name in names]


class CheckpointBundle(LatentBundle):
    """A bundle that can load the trained module of its checkpoint once more, as exports do."""

    path: str
    root: Path | None
    """The folder with the files of the checkpoint. None for a toy."""

    @property
    def is_toy(self) -> bool:
        """True for a model with random weights, which has no files."""
        return self.root is None

    @abstractmethod
    def untrained(self) -> nn.Module:
        """A second copy of the trained module on the CPU, with the checkpoint's own weights."""

    @abstractmethod
    def network_at(self, folder: Path) -> nn.Module:
        """The trained module on the CPU, with the weights in a folder in the layout of the checkpoint."""

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """`untrained` with `tensors` in place of its own. Raises ValueError for a name that it does not have."""
        module = self.untrained()
        replace_tensors(module, tensors)
        return module


class DiffusionBundle(LatentBundle):
    """A bundle of a denoising model with text encoders. Each method builds one component that the pipeline uses."""

    def stage(self) -> DiffusionStage:
        return DiffusionStage(self.denoiser(), self.facts, self.dtype)

    @abstractmethod
    def denoiser(self) -> Denoiser:
        """The trained network as a velocity field."""

    @abstractmethod
    def text_encoder(self) -> TextEncoder:
        """The encoder of prompts."""

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The encoder of condition images. None if the model takes none."""
        return None


class DiffusersBundle(CheckpointBundle, DiffusionBundle):
    """The components of one checkpoint. Components that model_index.json does not name are absent."""

    toy: ClassVar[Mapping[str, object]] = {"path": TOY, "dtype": "fp32"}
    family: ClassVar[DiffusersFamily]
    denoiser_class: ClassVar[type[NetworkDenoiser]]

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        vae_dtype: VaeDtype = "auto",
        meta_init: bool = False,
    ) -> None:
        """
        Args:
            components: load only these and the trained ones. None loads all.
            path: a hub id, a directory in the diffusers layout, `toy` (tiny, random), `random:<hub id>` (the sizes of a
                published model, random), or the name of a shipped model.
            revision: branch, tag or commit of a hub id.
            dtype: the compute dtype of transformer and encoders.
            vae_dtype: the compute dtype of the VAE. The word "auto" takes bf16 where `dtype` is bf16 and the family's
                published pipeline runs its VAE in bf16 (Qwen-Image), and otherwise fp32.
            meta_init: leave the trained module without storage; its backend reads only the shards it needs.
        """
        self.path = path
        self.revision = revision
        self.root = self._directory()
        # A run reads the files of the checkpoint. The published configurations are for plans without a connection.
        self.configs = self.family.toys[path] if self.root is None else self.family.read(self.root)
        facts = self.family.facts(self.configs, batch_multiple(device))
        trained = tuple(name for name in self.family.trained if name in self.configs)
        frozen = tuple(name for name in self.configs.components if name not in trained)
        wanted = components_to_load(components, (facts.trainable_attr, *frozen), facts.trainable_attr)
        self.dtype = TORCH_DTYPES[dtype]
        self.vae_dtype = self.family.vae_dtype(vae_dtype, dtype)
        with quiet_libraries():
            load = self._empty if meta_init else self._load
            parts = {name: load(name) for name in trained}
            modules = {facts.trainable_attr: self.assemble(parts)}
            modules |= {name: self._load(name) for name in wanted if name in frozen}
            self.tokenizers = self._load_tokenizers() if set(modules) - {facts.trainable_attr, VAE} else {}
        super().__init__(modules, facts, dtype=self.dtype, device=device)

    def stage(self) -> DiffusionStage:
        # Where all weights are trained, they are float32. With adapters, the base has the dtype of the computation.
        stage, network = super().stage(), self.trainable()
        stage.needs_autocast = lambda: not adapted_layers(network)
        return stage

    def denoiser(self) -> Denoiser:
        return self.denoiser_class(self.trainable(), self.facts)

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

    @classmethod
    def saved_matrices(cls, path: str) -> Collection[str]:
        """Names of the trained matrices in the weight files of a shipped or local model. Empty if there are none."""
        return cls.family.saved_matrices(path)

    @classmethod
    def decoding(
        cls,
        path: str,
        sampling: DiffusionSamplingParams,
        revision: str | None = None,
        *,
        vae_dtype: VaeDtype,
        dtype: DtypeName,
        tiled: bool,
    ) -> DecodingCost:
        """The cost of decoding one sample of a model that is not loaded, in tiles or whole."""
        return cls.family.decoding(path, sampling, revision, cls.family.vae_dtype(vae_dtype, dtype), tiled)

    # Weights

    def _directory(self) -> Path | None:
        """The directory with the files of the checkpoint, downloaded if need be. None for a toy."""
        return None if self.path in self.family.toys else self.family.directory(self.path, self.revision)

    def saved(self) -> SavedWeights:
        if self.root is None:
            return ModuleWeights(self.untrained())
        return self.saved_part(self.facts.trainable_attr)

    def read_adapter(self, path: str) -> AdapterLayers:
        return self.read_adapter_of(self.facts.trainable_attr, adapter_file(path))

    def read_adapter_of(self, component: str, file: Path) -> AdapterLayers:
        """The layers of a LoRA file of one trained component."""
        import diffusers

        def build() -> nn.Module:
            return self.family.build(self.configs, component)

        if has_peft_config(file):
            return read_peft(file, build)
        pipeline = getattr(diffusers, self.configs.pipeline or self.family.pipeline)
        return read_with_diffusers(file, pipeline, build)

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        other = copy(self)
        other.path, other.revision = path, revision
        other.root = other._directory()
        other.configs = self.family.toys[path] if other.root is None else self.family.read(other.root)
        return other.saved()

    def saved_part(self, component: str) -> SavedWeights:
        """The weights of a component in the checkpoint's directory, by their own names."""
        kind = self.family.class_of(component)
        assert self.root is not None, "a toy has no files"
        return SafetensorsWeights(self.root / component, lambda name: dtype_in(kind, name, self.dtype))

    def untrained(self) -> nn.Module:
        return self._copy_of(self._load)

    def network_at(self, folder: Path) -> nn.Module:
        return self._copy_of(lambda name: self.family.load(folder, name, self.dtype))

    def trained_parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """The networks that `assemble` joined, by component name."""
        return {self.facts.trainable_attr: module}

    def _copy_of(self, load: Callable[[str], nn.Module]) -> nn.Module:
        """A trained module on the CPU, made of the components that `load` reads."""
        with quiet_libraries():
            parts = {name: load(name) for name in self.family.trained if name in self.configs}
        return self.assemble(parts).requires_grad_(False).eval()

    def _load(self, name: str) -> nn.Module:
        dtype = self.vae_dtype if name == VAE else self.dtype
        if self.root is None:
            return self.family.random(self.configs, name, dtype)
        return self.family.load(self.root, name, dtype)

    def _empty(self, name: str) -> nn.Module:
        """A component whose parameters have no storage. Its computed buffers do."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            module = self.family.build(self.configs, name)
        cast_module(module, self.dtype)
        if self.root is not None:
            self.family.check(self.root, name, module, self.saved_part(name).shapes())
        return module

    def _load_tokenizers(self) -> dict[str, Any]:
        if self.root is None:
            return dict(self.family.toy_tokenizers())
        from transformers import AutoProcessor, AutoTokenizer

        names = [name for name in self.family.tokenizers if name in components_of(self.root)]
        readers = {name: AutoProcessor if "processor" in name else AutoTokenizer for name in names}
        return {name: reader.from_pretrained(self.root / name) for name, reader in readers.items()}
