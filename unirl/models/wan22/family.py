"""Wan 2.2: two experts of 14B, or one model of 5B that may read a first frame. Wan 2025 (arXiv:2503.20314).

model_index.json tells the models apart:

    boundary_ratio    14B experts: `transformer` for sigma >= boundary, `transformer_2` below; text or image to video
    expand_timesteps  5B model: one timestep per token, which is 0 at the first frame if there is one
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.denoising.bundle import ConditionImageEncoder
from unirl.models.denoising.diffusers_pipeline import PlainPipeline, without_bar
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.stage import Denoiser
from unirl.models.loading.adapter_files import DIFFUSERS_FILE, Adapter, write_diffusers_lora
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, read_configs
from unirl.models.loading.saved_weights import JoinedWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import t5_tokenizer
from unirl.models.wan21.family import (
    CLASSES,
    FIRST_FRAME,
    FURTHER_PIPELINES,
    PIPELINE,
    WanBundle,
    WanDenoiser,
    WanVAE,
    WanVideoPipeline,
    wan_facts,
)
from unirl.models.wan22.experts import WanExperts
from unirl.sde.guidance import ExpertGuidance, Guidance
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

FOLDER = Path(__file__).parent
HIGH, LOW = "transformer", "transformer_2"
"""Component names of the experts for high and low noise."""
FPS_5B = 24.0
MIN_SIGMA = 1e-3
"""The lowest training sigma of a flow. Divisions by sigma use at least this value."""
LORA_FILES = {HIGH: DIFFUSERS_FILE, LOW: "pytorch_lora_weights_2.safetensors"}
"""Adapter file of each expert. diffusers loads them with

pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights_2.safetensors", load_into_transformer_2=True)
"""


def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
    """The facts of a checkpoint. Raises NotFoundError (4001) for a Wan 2.1 checkpoint."""
    boundary = configs.settings.get("boundary_ratio")
    if (boundary is not None) != (LOW in configs):
        raise NotFoundError(
            f"this checkpoint has boundary_ratio={boundary} and {'a' if LOW in configs else 'no'} {LOW}: two "
            "experts need both. Use the whole checkpoint"
        )
    if boundary is not None:
        shared = wan_facts("wan22", configs, batch_multiple, ExpertGuidance(boundary=boundary))
        return replace(shared, expert_class_names=("WanTransformer3DModel",))
    if not configs.settings.get("expand_timesteps"):
        raise NotFoundError(
            "this is a Wan 2.1 checkpoint (model_index.json sets neither boundary_ratio nor expand_timesteps). "
            "Use unirl.models.wan21.family.Wan21Bundle and unirl.models.wan21.family.Wan21Pipeline"
        )
    shared = wan_facts("wan22", configs, batch_multiple, Guidance(), condition_images=(0, 1))
    return replace(shared, fps=FPS_5B)


def toy_tokenizers() -> dict[str, Any]:
    """A character-level tokenizer."""
    return {"tokenizer": t5_tokenizer()}


WAN22 = DiffusersFamily(
    name="wan22",
    pipeline=PIPELINE,
    further_pipelines=FURTHER_PIPELINES,
    classes={HIGH: CLASSES[HIGH], LOW: CLASSES[HIGH]} | {name: CLASSES[name] for name in ("text_encoder", "vae")},
    trained=(HIGH, LOW),
    optional=(LOW,),
    facts=facts,
    toys=read_configs(FOLDER / "toy.json"),
    toy_tokenizers=toy_tokenizers,
    published=read_configs(FOLDER / "published.json"),
)


class ExpertsDenoiser(WanDenoiser):
    """The two experts as a velocity field. Each row runs through the expert of its sigma."""

    def __init__(self, experts: Any, timestep_scale: float, multiple: int) -> None:
        """
        Args:
            multiple: the number of rows of each expert is filled up to a multiple of this.
        """
        super().__init__(experts, timestep_scale)
        self.multiple = multiple

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, H, W] fp32 at x [B, C, F, H, W] and sigma [B]."""
        return self._velocity(x, sigma, conditions, run_all=False)

    def velocity_by_all(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The same values, from a forward that runs both experts."""
        return self._velocity(x, sigma, conditions, run_all=True)

    def _velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions, run_all: bool) -> Tensor:
        inputs = self.inputs(x, sigma, conditions)
        v: Tensor = self.transformer(sigma, inputs, multiple=self.multiple, run_all=run_all)
        return v.float()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.transformer.transformer.patch_embedding.weight.dtype
        return dtype


class FirstFrameDenoiser(WanDenoiser):
    """The 5B model as a velocity field. A first frame replaces the first latent frame, with timestep 0 at its tokens.

    The velocity there is that of the straight path from the noise to the frame, (x - frame) / sigma, so that any
    solver ends in the frame and a forward-process loss is 0 at it. That velocity depends on no weight, so the first
    latent frame contributes 0 to a log-ratio, which is a mean over latent elements.
    """

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, h, w] fp32 at x [B, C, F, h, w] and sigma [B], given `text` and perhaps a first frame."""
        first_frame = conditions.get(FIRST_FRAME)
        if not isinstance(first_frame, LatentCondition):
            return super().velocity(x, sigma, conditions)
        frame = first_frame.latents.to(x)
        inputs = self.inputs(torch.cat([frame, x[:, :, 1:]], dim=2), sigma, {"text": conditions["text"]})
        inputs["timestep"] = self._timesteps(x, sigma)
        v: Tensor = self.transformer(**inputs, return_dict=False)[0]
        level = sigma.clamp(min=MIN_SIGMA).view(-1, 1, 1, 1, 1)
        return torch.cat([(x[:, :, :1] - frame) / level, v[:, :, 1:].float()], dim=2)

    def _timesteps(self, x: Tensor, sigma: Tensor) -> Tensor:
        """[B, L] timestep of each token, 0 in the first latent frame."""
        _, rows, columns = self.transformer.config.patch_size
        tokens_per_frame = (x.shape[3] // rows) * (x.shape[4] // columns)
        timesteps = (self.timestep_scale * sigma)[:, None].repeat(1, x.shape[2])
        timesteps[:, 0] = 0.0
        return timesteps.repeat_interleave(tokens_per_frame, dim=1)


class FirstLatentEncoder:
    """A first frame as the 5B model reads it: its VAE latents, as in diffusers' `WanImageToVideoPipeline`."""

    def __init__(self, vae: WanVAE) -> None:
        self.vae = vae
        self.components = vae.components

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, C, 1, h, w] of images [B, 1, 3, H, W] in [0, 1]."""
        return {FIRST_FRAME: LatentCondition(latents=self.vae.encode(images[:, 0]))}


class Wan22Bundle(WanBundle):
    """Wan 2.2. The two experts of the 14B models are one trained module."""

    family: ClassVar[DiffusersFamily] = WAN22

    @property
    def has_experts(self) -> bool:
        """True for the 14B models, False for the 5B model."""
        return LOW in self.configs

    def assemble(self, parts: Mapping[str, nn.Module]) -> nn.Module:
        """Both experts as one module, or the 5B model."""
        if not self.has_experts:
            return super().assemble(parts)
        return WanExperts(parts[HIGH], parts[LOW], self.configs.settings["boundary_ratio"])

    def trained_parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Both experts, or the 5B model, by component name."""
        return {name: module.get_submodule(name) for name in (HIGH, LOW)} if self.has_experts else {HIGH: module}

    def saved(self) -> SavedWeights:
        """The trained weights in the checkpoint, read row by row."""
        if not self.has_experts or self.family.is_toy(self.path):
            return super().saved()
        return JoinedWeights({name: self.saved_part(name) for name in (HIGH, LOW)})

    def denoiser(self) -> Denoiser:
        """The experts, or the 5B model, as a velocity field."""
        if self.has_experts:
            return ExpertsDenoiser(self.trainable(), self.facts.timestep_scale, self.facts.batch_multiple)
        return FirstFrameDenoiser(self.trainable(), self.facts.timestep_scale)

    def first_frame_encoder(self) -> ConditionImageEncoder:
        """The experts read a first frame in further channels, the 5B model in place of the first latent frame."""
        return super().first_frame_encoder() if self.has_experts else FirstLatentEncoder(self.vae())


class Wan22ImageBundle(Wan22Bundle):
    """Wan 2.2, with a toy of image to video."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-i2v"}


class Wan22SmallBundle(Wan22Bundle):
    """Wan 2.2, with a toy of the 5B model."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-ti2v"}


class Wan22Pipeline(WanVideoPipeline[Wan22Bundle]):
    """Videos with Wan 2.2."""

    lora_formats: ClassVar[tuple[str, ...]] = ("diffusers-lora",)

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels [B, 3, F, H, W]. diffusers gives the 5B model a first frame through another pipeline class."""
        if images is not None and not self.bundle.has_experts:
            plain = _image_to_video(plain)
        return super().sample_with_diffusers(plain, texts, x_T, params, images)

    def settings(self, params: DiffusionSamplingParams) -> Mapping[str, Any]:
        """The arguments of diffusers, with the guidance scale of the second expert."""
        settings = super().settings(params)
        if not self.bundle.has_experts:
            return settings
        first = params.guidance_scale
        second = first if params.guidance_scale_2 is None else params.guidance_scale_2
        if first == 1.0 and second != 1.0:
            first = math.nextafter(1.0, 2.0)  # diffusers guides neither expert if the first scale is 1
        return {**settings, "guidance_scale": first, "guidance_scale_2": second}

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Writes one adapter file, or one per expert, into `folder`."""
        if not self.bundle.has_experts:
            return super().write_lora(folder, adapter)
        for part, file in LORA_FILES.items():
            layers = {
                name.removeprefix(f"{part}."): pair
                for name, pair in adapter.layers.items()
                if name.startswith(f"{part}.")
            }
            write_diffusers_lora(folder, replace(adapter, layers=layers), file=file)
        return folder

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """Loads the adapter files as a user of diffusers does."""
        if not self.bundle.has_experts:
            return super().load_lora(plain, folder)
        for part, file in LORA_FILES.items():
            plain.load_lora_weights(str(folder), weight_name=file, load_into_transformer_2=part == LOW)


def _image_to_video(plain: PlainPipeline) -> PlainPipeline:
    """The image-to-video pipeline with the components of a text-to-video pipeline."""
    import diffusers

    return without_bar(diffusers.WanImageToVideoPipeline(**plain.components, expand_timesteps=True))
