"""Stable Diffusion 3 and 3.5 from diffusers classes: a hub id, a directory, the toy, or a shipped small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from unirl.config.errors import DataError
from unirl.models.base import Decoder, DiffusionBundle, Encoder, TextEncoder, chosen
from unirl.models.estimate import ModelEstimate
from unirl.models.hub import NOT_FOUND, components
from unirl.models.quiet import quiet_libraries
from unirl.models.saved import ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.sd3.architecture import ENCODERS, Architecture, directory_of, estimate
from unirl.models.sd3.denoiser import SD3Denoiser
from unirl.models.sd3.text import SD3TextEncoder
from unirl.models.sd3.toy import SEED, toy_tokenizers
from unirl.models.sd3.vae import PixelDecoder, PixelEncoder, SD3Decoder, SD3Encoder
from unirl.types.facts import LatentFacts
from unirl.types.protocols import TORCH_DTYPES, DtypeName

CPU = torch.device("cpu")


class SD3Bundle(DiffusionBundle):
    """MMDiT, VAE, CLIP-L, CLIP-G and T5; what model_index.json leaves out is absent (no VAE = pixel space)."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "dtype": "fp32"}

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
            components: load the transformer and these only; absent = all.
            path: a hub id, a directory in the diffusers layout, `toy` (tiny, random), or the name
                of a shipped small model (`SHIPPED`).
            revision: branch, tag or commit of a hub id.
            dtype: what transformer and encoders compute in; the VAE is fp32.
            meta_init: leave the transformer without storage: the backend that trains it reads its shards only.
        """
        self.path = path
        self.revision = revision
        self.architecture = Architecture.of(path, revision)
        facts = self.architecture.facts(batch_multiple(device))
        names = chosen(components, self.architecture.component_names, facts.trainable_attr)
        with quiet_libraries():
            modules = self._load(tuple(n for n in names if n != "transformer" or not meta_init), TORCH_DTYPES[dtype])
            if meta_init:
                modules["transformer"] = self.architecture.build_empty("transformer").to(TORCH_DTYPES[dtype])
            self.tokenizers = self._load_tokenizers() if modules.keys() & set(ENCODERS) else {}
        super().__init__(modules, facts, dtype=TORCH_DTYPES[dtype], device=device)

    @staticmethod
    def facts_of(path: str, revision: str | None = None, device: torch.device = CPU) -> LatentFacts:
        """The facts of a model that is not loaded, from its configuration files."""
        return Architecture.of(path, revision).facts(batch_multiple(device))

    @staticmethod
    def estimate(path: str, revision: str | None = None) -> ModelEstimate:
        """Parameter counts of a model that is not loaded."""
        return estimate(Architecture.of(path, revision))

    def denoiser(self) -> SD3Denoiser:
        """The transformer as a velocity field."""
        return SD3Denoiser(self.trainable(), self.facts.timestep_scale)

    def text_encoder(self) -> TextEncoder:
        """The text encoders that this checkpoint has."""
        self._require(tuple(self.architecture.encoders), "encode text")
        return SD3TextEncoder(self.modules, self.tokenizers, self.architecture.transformer["joint_attention_dim"])

    def decoder(self) -> Decoder:
        """The VAE, or the identity of a model on pixels."""
        if self.architecture.vae is None:
            return PixelDecoder()
        self._require(("vae",), "decode latents")
        return SD3Decoder(self.modules["vae"])

    def encoder(self) -> Encoder:
        """The VAE, or the identity of a model on pixels."""
        if self.architecture.vae is None:
            return PixelEncoder()
        self._require(("vae",), "encode pictures")
        return SD3Encoder(self.modules["vae"])

    def saved(self) -> SavedWeights:
        """The transformer's weights in the checkpoint."""
        if self.path == "toy":
            return ModuleWeights(self.untrained())
        return SafetensorsWeights(directory_of(self.path, self.revision) / "transformer", self.dtype)

    def _require(self, names: tuple[str, ...], task: str) -> None:
        missing = [name for name in names if name not in self.modules]
        if missing:
            raise ValueError(f"this bundle was built without {', '.join(missing)}, so it cannot {task}")

    def untrained(self) -> nn.Module:
        """A second transformer on the CPU with the checkpoint's own weights, as they were before training."""
        with quiet_libraries():
            return self._load(("transformer",), self.dtype)["transformer"].requires_grad_(False).eval()

    def _load(self, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, nn.Module]:
        if self.path == "toy":
            return {name: _random(self.architecture, name, _dtype_of(name, dtype)) for name in names}
        root = directory_of(self.path, self.revision)
        return {name: _read(root, name, _dtype_of(name, dtype)) for name in names}

    def _load_tokenizers(self) -> dict[str, Any]:
        if self.path == "toy":
            return toy_tokenizers()
        from transformers import AutoTokenizer

        root = directory_of(self.path, self.revision)
        names = [name for name in components(root) if name.startswith("tokenizer")]
        return {name: AutoTokenizer.from_pretrained(root / name) for name in names}


def batch_multiple(device: torch.device) -> int:
    """The rows that forward batches are filled to: on CPUs a row's bits are the same in any multiple of 4."""
    return 4 if device.type == "cpu" else 1


def _dtype_of(component: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if component == "vae" else dtype


def _random(architecture: Architecture, component: str, dtype: torch.dtype) -> nn.Module:
    """The toy's component: the same random weights whenever and wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = architecture.build(component)
    return module if dtype == torch.float32 else module.to(dtype)


def _read(root: Path, component: str, dtype: torch.dtype) -> nn.Module:
    import diffusers
    import transformers

    try:
        if component == "transformer":
            return diffusers.SD3Transformer2DModel.from_pretrained(root, subfolder=component, dtype=dtype)
        if component == "vae":
            return diffusers.AutoencoderKL.from_pretrained(root, subfolder=component, dtype=dtype)
        if component == "text_encoder_3":
            return transformers.T5EncoderModel.from_pretrained(root, subfolder=component, dtype=dtype)
        return transformers.CLIPTextModelWithProjection.from_pretrained(root, subfolder=component, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        # The libraries raise these three for missing, cut and foreign weight files.
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"cannot load {component} of the model in {root}: {reason}. Download it again", code=NOT_FOUND
        ) from error
