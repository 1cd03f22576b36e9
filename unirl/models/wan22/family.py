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
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.chunks import padded_rows
from unirl.models.denoising.bundle import ConditionImageEncoder
from unirl.models.denoising.diffusers_pipeline import PlainPipeline, without_bar
from unirl.models.denoising.stage import Denoiser
from unirl.models.denoising.vae import IMAGE, ReferenceEncoder
from unirl.models.loading.adapter_files import DIFFUSERS_FILE, Adapter, write_diffusers_lora
from unirl.models.loading.adapter_sources import AdapterLayers, adapter_file
from unirl.models.loading.checkpoint import DiffusersFamily, ModelConfigs, family_files
from unirl.models.loading.saved_weights import JoinedWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import t5_tokenizer
from unirl.models.wan21 import family as wan21
from unirl.sde.guidance import ExpertGuidance, Guidance
from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions, LatentCondition
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

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
        shared = wan21.wan_facts("wan22", configs, batch_multiple, ExpertGuidance(boundary=boundary))
        return replace(shared, expert_class_names=("WanTransformer3DModel",))
    if not configs.settings.get("expand_timesteps"):
        raise NotFoundError(
            "this is a Wan 2.1 checkpoint (model_index.json sets neither boundary_ratio nor expand_timesteps). "
            "Use unirl.models.wan21.family.Wan21Bundle and unirl.models.wan21.family.Wan21Pipeline"
        )
    shared = wan21.wan_facts("wan22", configs, batch_multiple, Guidance(), condition_images=(0, 1))
    return replace(shared, fps=FPS_5B)


WAN22 = DiffusersFamily(
    name="wan22",
    pipeline=wan21.PIPELINE,
    further_pipelines=wan21.FURTHER_PIPELINES,
    classes={HIGH: wan21.CLASSES[HIGH], LOW: wan21.CLASSES[HIGH]}
    | {name: wan21.CLASSES[name] for name in ("text_encoder", "vae")},
    trained=(HIGH, LOW),
    optional=(LOW,),
    facts=facts,
    toy_tokenizers=lambda: {"tokenizer": t5_tokenizer()},
    **family_files(__file__),
)


class WanExperts(nn.Module):
    """The two experts as one trained module. Each row runs through the expert of its sigma.

    rows of one forward   a b c d e        sigma >= boundary: a c d   below: b e
    high noise            a c d + a copy   --transformer-->    v
    low noise             b e + 2 copies   --transformer_2-->  v
    back in order         a b c d e
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary

    def forward(
        self, levels: Sequence[float], inputs: dict[str, Tensor | None], *, multiple: int, run_all: bool = False
    ) -> Tensor:
        """v [B, C, F, H, W] of rows at noise levels sigma.

        Args:
            levels: [B] the noise levels, on the host.
            inputs: arguments of the transformers, one row each.
            multiple: each expert's rows are padded to a multiple of this with copies, so that a row's bits do not
                depend on the sigmas of its neighbours.
            run_all: an expert without rows runs on copies whose result is unused, so its gradient is 0, not absent.
        """
        high = (torch.tensor(levels) >= self.boundary).tolist()
        results: list[Tensor] = []
        sources: list[int | None] = []  # the row of each result; None for copies
        for expert, is_high in ((self.transformer, True), (self.transformer_2, False)):
            rows = [row for row, level in enumerate(high) if level == is_high]
            if rows or run_all:
                padded = [(rows or [0])[i] for i in padded_rows(max(1, len(rows)), multiple)]
                chosen = inputs
                if padded != list(range(len(high))):
                    chosen = {
                        name: None if value is None else take_rows(value, padded) for name, value in inputs.items()
                    }
                results.append(expert(**chosen, return_dict=False)[0])
                sources += [*rows, *[None] * (len(padded) - len(rows))]
        v = results[0] if len(results) == 1 else torch.cat(results)
        if sources == list(range(len(high))):
            return v
        in_order: Tensor = take_rows(v, [sources.index(row) for row in range(len(high))])
        return in_order


class ExpertsDenoiser(wan21.WanDenoiser):
    """The two experts as a velocity field. Each row runs through the expert of its sigma."""

    matrix: ClassVar[str] = f"{HIGH}.{wan21.WanDenoiser.matrix}"

    def block_chains(self) -> list[list[nn.Module]]:
        return [self.chain_of(self.network.get_submodule(part)) for part in (HIGH, LOW)]

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.velocity_at(x, sigma, conditions, sigma.tolist())

    def velocity_at(
        self, x: Tensor, sigma: Tensor, conditions: Conditions, levels: Sequence[float], run_all: bool = False
    ) -> Tensor:
        """The same values where the host knows the levels: those of the first rows of `sigma`, which repeats them."""
        inputs, repeats = self.inputs(x, sigma, conditions), len(x) // len(levels)
        v: Tensor = self.network([*levels] * repeats, inputs, multiple=self.facts.batch_multiple, run_all=run_all)
        return v.float()

    def velocity_by_all(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """The same values, from a forward that runs both experts."""
        return self.velocity_at(x, sigma, conditions, sigma.tolist(), run_all=True)


class FirstFrameDenoiser(wan21.WanDenoiser):
    """The 5B model as a velocity field. A first frame replaces the first latent frame, with timestep 0 at its tokens.

    The velocity there is that of the straight path from the noise to the frame, (x - frame) / sigma, so that any
    solver ends in the frame and a forward-process loss is 0 at it. That velocity depends on no weight, so the first
    latent frame contributes 0 to a log-ratio, which is a mean over latent elements.
    """

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, F, h, w] fp32 at x [B, C, F, h, w] and sigma [B], given `text` and perhaps a first frame."""
        first_frame = conditions.get(IMAGE)
        if not isinstance(first_frame, LatentCondition):
            return super().velocity(x, sigma, conditions)
        frame = first_frame.latents.to(x)
        inputs = self.inputs(torch.cat([frame, x[:, :, 1:]], dim=2), sigma, {"text": conditions["text"]})
        timesteps = (self.timestep_scale * sigma)[:, None].repeat(1, x.shape[2])  # [B, F]
        timesteps[:, 0] = 0.0
        tokens_per_frame = (x.shape[3] // self.facts.patch_size) * (x.shape[4] // self.facts.patch_size)
        inputs["timestep"] = timesteps.repeat_interleave(tokens_per_frame, dim=1)
        v: Tensor = self.network(**inputs, return_dict=False)[0]
        level = sigma.clamp(min=MIN_SIGMA).view(-1, 1, 1, 1, 1)
        return torch.cat([(x[:, :, :1] - frame) / level, v[:, :, 1:].float()], dim=2)


class FirstLatentEncoder(ReferenceEncoder):
    """A first frame as the 5B model reads it: its VAE latents, as in diffusers' `WanImageToVideoPipeline`."""

    def encode(self, images: Tensor, params: DiffusionSamplingParams) -> Conditions:
        """`image`: latents [B, C, 1, h, w] of images [B, 1, 3, H, W] in [0, 1]."""
        return {IMAGE: LatentCondition(latents=self.encoder.encode(images[:, 0]))}


class Wan22Bundle(wan21.WanBundle):
    """Wan 2.2. The two experts of the 14B models are one trained module."""

    family: ClassVar[DiffusersFamily] = WAN22

    @property
    def has_experts(self) -> bool:
        """True for the 14B models, False for the 5B model."""
        return LOW in self.configs

    def assemble(self, parts: Mapping[str, nn.Module]) -> nn.Module:
        if not self.has_experts:
            return super().assemble(parts)
        return WanExperts(parts[HIGH], parts[LOW], self.configs.settings["boundary_ratio"])

    def trained_parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        return {name: module.get_submodule(name) for name in (HIGH, LOW)} if self.has_experts else {HIGH: module}

    def read_adapter(self, path: str) -> AdapterLayers:
        """The layers of both experts, from the two files that `write_lora` writes."""
        if not self.has_experts:
            return super().read_adapter(path)
        files = {part: adapter_file(path, file) for part, file in LORA_FILES.items()}
        parts = {part: self.read_adapter_of(part, file) for part, file in files.items()}
        return {f"{part}.{name}": layer for part, layers in parts.items() for name, layer in layers.items()}

    def saved(self) -> SavedWeights:
        if not self.has_experts or self.root is None:
            return super().saved()
        return JoinedWeights({name: self.saved_part(name) for name in (HIGH, LOW)})

    def denoiser(self) -> Denoiser:
        if self.has_experts:
            return ExpertsDenoiser(self.trainable(), self.facts)
        return FirstFrameDenoiser(self.trainable(), self.facts)

    def condition_image_encoder(self) -> ConditionImageEncoder | None:
        """The experts read a first frame in further channels, the 5B model in place of the first latent frame."""
        return super().condition_image_encoder() if self.has_experts else FirstLatentEncoder(self.vae())


class Wan22ImageBundle(Wan22Bundle):
    """Wan 2.2, with a toy of image to video."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-i2v"}


class Wan22SmallBundle(Wan22Bundle):
    """Wan 2.2, with a toy of the 5B model."""

    toy: ClassVar[Mapping[str, object]] = {**Wan22Bundle.toy, "path": "toy-ti2v"}


class Wan22Pipeline(wan21.WanVideoPipeline[Wan22Bundle]):
    """Videos with Wan 2.2."""

    lora_formats: ClassVar[tuple[str, ...]] = ("diffusers-lora",)

    def configured(self, plain: PlainPipeline, params: DiffusionSamplingParams, with_images: bool) -> PlainPipeline:
        """diffusers gives the 5B model a first frame through another pipeline class."""
        if not with_images or self.bundle.has_experts:
            return plain
        import diffusers

        return without_bar(diffusers.WanImageToVideoPipeline(**plain.components, expand_timesteps=True))

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """With the guidance scale of the second expert."""
        arguments = super().call_arguments(texts, x_T, params)
        if not self.bundle.has_experts:
            return arguments
        first = params.guidance_scale
        second = first if params.guidance_scale_2 is None else params.guidance_scale_2
        if first == 1.0 and second != 1.0:
            first = math.nextafter(1.0, 2.0)  # diffusers guides neither expert if the first scale is 1
        return arguments | {"guidance_scale": first, "guidance_scale_2": second}

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

    @property
    def lora_lines(self) -> tuple[str, ...]:
        if not self.bundle.has_experts:
            return super().lora_lines
        return tuple(
            f'pipe.load_lora_weights(".", weight_name="{file}", load_into_transformer_2={part == LOW})'
            for part, file in LORA_FILES.items()
        )

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        if not self.bundle.has_experts:
            return super().load_lora(plain, folder)
        for part, file in LORA_FILES.items():
            plain.load_lora_weights(str(folder), weight_name=file, load_into_transformer_2=part == LOW)
