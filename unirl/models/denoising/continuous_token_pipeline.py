"""The bundle and the pipeline of models whose image tokens are denoised one after another, and their export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn

from unirl.models.denoising.bundle import CheckpointBundle, Decoder
from unirl.models.denoising.continuous_tokens import TOKENS, ContinuousTokenDenoiser, ContinuousTokenStage, normed
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.denoising.peft_pipeline import PeftPipeline
from unirl.models.denoising.vae import KLDecoder
from unirl.models.loading.checkpoint import VAE
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.lora import adapted_layers
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.protocols import Capabilities

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = Mapping[str, Any]


class ContinuousTokenBundle(CheckpointBundle):
    """One network that reads text and image tokens and denoises image tokens; a VAE; a tokenizer."""

    config: Config
    """The configuration of the network, as its checkpoint has it."""
    tokenizer: PreTrainedTokenizerBase
    norm_tokens: bool
    """Give each finished image token the mean 0 and the variance 1 before the network and the VAE read it."""

    def stage(self) -> ContinuousTokenStage:
        network = self.trainable()
        denoiser = ContinuousTokenDenoiser(network, self.facts, norm_tokens=self.norm_tokens)
        stage = ContinuousTokenStage(denoiser, self.facts, self.dtype)
        # Where all weights are trained, they are float32. With adapters, the base has the dtype of the computation.
        stage.needs_autocast = lambda: not adapted_layers(network)
        return stage

    def decoder(self) -> Decoder:
        [vae] = self.require((VAE,), "decode latents")
        return NormedDecoder(vae, self.facts.patch_size) if self.norm_tokens else KLDecoder(vae)


class NormedDecoder(KLDecoder):
    """The decoder of a VAE whose latents have the mean 0 and the variance 1 in each image token."""

    def __init__(self, vae: nn.Module, patch_size: int) -> None:
        super().__init__(vae)
        self.patch_size = patch_size

    def decode(self, latents: Tensor) -> Tensor:
        tokens = normed(packed(latents, self.patch_size))
        return super().decode(unpacked(tokens, latents.shape, self.patch_size))


BundleT = TypeVar("BundleT", bound=ContinuousTokenBundle, covariant=True)


class ContinuousTokenPipeline(PeftPipeline[BundleT]):
    """A pipeline that gives replays the finished images, and exports the network in one file with its configuration."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image",))

    def replayed(self, conditions: Conditions, latents: Tensor) -> Conditions:
        """The conditions, with the finished image, on whose earlier tokens each token depends."""
        return {**conditions, TOKENS: LatentCondition(latents=latents)}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the model as its checkpoints are, with `tensors` in place of its own, and the VAE for diffusers."""
        from huggingface_hub import save_torch_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(self.bundle.with_tensors(tensors).state_dict(), folder)
        (folder / "config.json").write_text(json.dumps(dict(self.bundle.config), indent=2), encoding="utf-8")
        vae: Any = self.bundle.modules[VAE]
        with quiet_libraries():
            self.bundle.tokenizer.save_pretrained(folder)
            vae.save_pretrained(folder / VAE)
        return folder
