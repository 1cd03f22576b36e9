"""The bundle and the pipeline of models whose image tokens are denoised one after another, and their export."""

from __future__ import annotations

import dataclasses
import json
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from unirl.models.denoising.bundle import Decoder, LatentBundle
from unirl.models.denoising.continuous_tokens import TOKENS, ContinuousTokenDenoiser, ContinuousTokenStage, normed
from unirl.models.denoising.pipeline import LatentPipeline
from unirl.models.denoising.vae import KLDecoder, packed, unpacked
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.loading.checkpoint import VAE
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.lora import adapted_layers
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = Mapping[str, Any]


class ContinuousTokenBundle(LatentBundle):
    """One network that reads text and image tokens and denoises image tokens; a VAE; a tokenizer."""

    path: str
    config: Config
    """The configuration of the network, as its checkpoint has it."""
    tokenizer: PreTrainedTokenizerBase
    norm_tokens: bool
    """Give each finished image token the mean 0 and the variance 1 before the network and the VAE read it."""

    @abstractmethod
    def untrained(self) -> nn.Module:
        """A second copy of the network on the CPU, with the checkpoint's own weights."""

    @abstractmethod
    def network_at(self, folder: Path) -> nn.Module:
        """The network on the CPU, with the weights that `write_model` wrote into a folder."""

    def stage(self) -> ContinuousTokenStage:
        return self.stage_over(self.trainable())

    def stage_over(self, network: nn.Module) -> ContinuousTokenStage:
        """The stage of the trained network, or of another copy of it."""
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


class ContinuousTokenPipeline(LatentPipeline[BundleT]):
    """A pipeline that gives replays the finished images, and exports to safetensors and peft."""

    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)

    def replayed(self, conditions: Conditions, latents: Tensor) -> Conditions:
        """The conditions, with the finished image, on whose earlier tokens each token depends."""
        return {**conditions, TOKENS: LatentCondition(latents=latents)}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the model as its checkpoints are, with `tensors` in place of its own, and the VAE for diffusers."""
        from huggingface_hub import save_torch_state_dict

        network = self.bundle.untrained()
        unexpected = network.load_state_dict(dict(tensors), strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the model has no parameter {unexpected[0]!r} ({len(unexpected)} unknown names)")
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(network.state_dict(), folder)
        (folder / "config.json").write_text(json.dumps(dict(self.bundle.config), indent=2), encoding="utf-8")
        vae: Any = self.bundle.modules[VAE]
        with quiet_libraries():
            self.bundle.tokenizer.save_pretrained(folder)
            vae.save_pretrained(folder / VAE)
        return folder

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write an adapter as a folder that peft loads onto the untrained network."""
        return write_peft_adapter(folder, adapter, self.bundle.path)

    def verify_model(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between samples of the current weights and of the network read from `folder`."""
        return self._difference(self.bundle.network_at(folder), texts, params)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """The same for the untrained network with the adapter in `folder`, which peft loads and merges."""
        from peft import PeftModel

        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            adapted = PeftModel.from_pretrained(self.bundle.untrained(), str(folder)).merge_and_unload()
        return self._difference(adapted, texts, params)

    @torch.no_grad()
    def _difference(self, network: nn.Module, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between Euler samples of the current weights and of `network`."""
        params = dataclasses.replace(params.deterministic(), solver=None, trajectory_dtype="fp32")
        params = params.pinned(0, tuple(self.sigmas(params).tolist()))
        ids = [f"verify:{i}" for i in range(len(texts))]
        noise = NoiseSource(params.seed, "eval", 0)
        x_T = self.initial_noise(noise, ids, params)  # noqa: N806
        conditions = self.encode(texts, params)
        stages = (self.stage, self.bundle.stage_over(network.to(self.bundle.device)))
        ours, theirs = (stage.sample(conditions, x_T, params, noise, ids).final for stage in stages)
        return float((ours - theirs).abs().max())
