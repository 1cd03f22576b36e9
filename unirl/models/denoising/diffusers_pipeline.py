"""Exports a trained model to diffusers, and compares the samples of diffusers with those of our sampler."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from unirl.models.denoising.bundle import DiffusersBundle, LatentBundle
from unirl.models.denoising.embeddings import ConditionImages, PromptEmbeddings
from unirl.models.denoising.pipeline import DiffusionPipeline, LatentPipeline
from unirl.models.images import to_pil
from unirl.models.loading.adapter_files import Adapter, write_diffusers_lora
from unirl.models.loading.base_model import LOAD_LORA, BaseModel
from unirl.models.loading.hub import components, quiet_libraries
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    import diffusers

PlainPipeline: TypeAlias = "diffusers.DiffusionPipeline"
DiffusersBundleT = TypeVar("DiffusersBundleT", bound=DiffusersBundle, covariant=True)


class DiffusersPipeline(DiffusionPipeline[DiffusersBundleT]):
    """A pipeline over a family of diffusers, with export to diffusers and verification of the export."""

    embed: PromptEmbeddings[TextEmbedCondition]
    lora_formats: ClassVar[tuple[str, ...]] = ("diffusers-lora", "peft")

    @property
    def base_model(self) -> BaseModel:
        """The model before training, as diffusers loads it."""
        family, path = self.bundle.family, self.bundle.path
        return BaseModel(
            library="diffusers",
            loader="DiffusionPipeline",
            component=self.bundle.facts.trainable_attr,
            shipped=family.shipped.get(path),
            is_toy=path in family.toys,
            lora_lines=self.lora_lines,
        )

    @property
    def lora_lines(self) -> tuple[str, ...]:
        """The lines of Python that do what `load_lora` does, with an adapter in the current folder."""
        return LOAD_LORA

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Samples of diffusers' own pipeline `plain` from noise x_T [B, *latent], with settings equal to `params`.

        Pixels [B, 3, H, W] or [B, 3, F, H, W] in [0, 1], or latents [B, *latent] if the checkpoint has no VAE. Rows
        with images are sampled one by one, because diffusers gives the images of a call to all of its prompts.
        """
        plain = self.configured(plain, params, images is not None)
        if images is None:
            return call_diffusers(plain, self.call_arguments(texts, x_T, params))
        rows = [
            self.call_arguments([text], x, params) | self.image_arguments(text, row, params)
            for text, x, row in zip(texts, x_T.split(1), images, strict=True)
        ]
        return torch.cat([call_diffusers(plain, arguments) for arguments in rows])

    def configured(self, plain: PlainPipeline, params: DiffusionSamplingParams, with_images: bool) -> PlainPipeline:
        """diffusers' pipeline with the settings of `params` that its call does not take."""
        return plain

    def call_arguments(self, texts: Sequence[str], x_T: Tensor, params: DiffusionSamplingParams) -> dict[str, object]:  # noqa: N803
        """The arguments of diffusers' pipeline for `sample_with_diffusers`, by their usual names and meanings."""
        return {
            "prompt": list(texts),
            "negative_prompt": [params.negative_prompt] * len(texts),
            "max_sequence_length": params.max_sequence_length,
            "height": params.height,
            "width": params.width,
            "num_frames": params.num_frames,
            "guidance_scale": params.guidance_scale,
            "num_inference_steps": params.num_inference_steps,
            "sigmas": unshifted_sigmas(params.num_inference_steps),
            "latents": x_T,
            "output_type": "pt",
        }

    def image_arguments(self, text: str, images: ConditionImages, params: DiffusionSamplingParams) -> dict[str, object]:
        """The arguments for a prompt with images, beside or in place of `call_arguments`."""
        return {"image": [to_pil(pixels) for pixels in images.pixels]}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the whole model as a diffusers directory, with `tensors` in place of those of the trained module."""
        trained = self.bundle.with_tensors(tensors)
        with quiet_libraries():
            plain_pipeline(self.bundle, trained).save_pretrained(folder)
        return folder

    def extra_components(self) -> Mapping[str, object]:
        """Components that are passed to diffusers beside a directory, because it cannot read them by itself."""
        return {}

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write the files that `load_lora` loads into diffusers' pipeline."""
        return write_diffusers_lora(folder, adapter)

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """Load the adapter into diffusers' pipeline, as a user of diffusers does."""
        plain.load_lora_weights(str(folder))

    def verify_lora(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between our sampler, current weights, and diffusers with the adapter in `folder`."""
        plain = plain_pipeline(self.bundle, self.bundle.untrained().to(self.bundle.device))
        with quiet_libraries():
            self.load_lora(plain, folder)
        return difference(self, plain, texts, params)

    def verify_model(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between our sampler with the current weights and diffusers with the model in `folder`."""
        family = self.bundle.family
        kind = pipeline_class(self.bundle)
        # diffusers needs absent components as explicit None.
        absent = {name: None for name in (*family.classes, *family.tokenizers) if name not in components(folder)}
        with quiet_libraries():
            plain = kind.from_pretrained(
                folder, dtype=self.bundle.dtype, **_accepted(kind, {**absent, **self.extra_components()})
            )
        return difference(self, without_bar(plain).to(self.bundle.device), texts, params)


def call_diffusers(plain: PlainPipeline, arguments: Mapping[str, object]) -> Tensor:
    """Samples [B, 3, H, W] or [B, 3, F, H, W] of a diffusers pipeline, without arguments that it does not have."""
    names = inspect.signature(plain.__call__).parameters
    samples: Tensor = plain(**{name: value for name, value in arguments.items() if name in names}, return_dict=False)[0]
    return samples.transpose(1, 2) if samples.dim() == 5 else samples


def plain_pipeline(bundle: DiffusersBundle, trained: nn.Module, **changes: object) -> PlainPipeline:
    """diffusers' own pipeline with a trained module and the frozen components of the bundle; absent ones are None.

    Args:
        changes: components and settings that replace those of the checkpoint.
    """
    import diffusers

    family, kind = bundle.family, pipeline_class(bundle)
    parts: dict[str, object] = {name: bundle.modules.get(name) for name in family.classes if name not in family.trained}
    parts |= {name: bundle.tokenizers.get(name) for name in family.tokenizers}
    parts |= dict.fromkeys(family.trained) | dict(bundle.trained_parts(trained))
    with quiet_libraries():
        name = bundle.configs.scheduler.get("_class_name", "FlowMatchEulerDiscreteScheduler")
        scheduler = getattr(diffusers, name).from_config(dict(bundle.configs.scheduler))
        parts |= {name: family.class_of(name).from_config(dict(c)) for name, c in bundle.configs.guiders.items()}
        plain = kind(**{"scheduler": scheduler, **_accepted(kind, parts), **bundle.configs.settings, **changes})
    return without_bar(plain)


def pipeline_class(bundle: DiffusersBundle) -> type[PlainPipeline]:
    """The class of diffusers that the bundle's checkpoint belongs to."""
    import diffusers

    with quiet_libraries():  # the import logs messages
        return getattr(diffusers, bundle.configs.pipeline or bundle.family.pipeline)


def _accepted(kind: type[PlainPipeline], parts: Mapping[str, object]) -> dict[str, object]:
    """`parts` without absent components that the pipeline class does not accept."""
    places = inspect.signature(kind).parameters
    return {name: part for name, part in parts.items() if part is not None or name in places}


def without_bar(plain: PlainPipeline) -> PlainPipeline:
    """The same pipeline without a progress bar."""
    plain.set_progress_bar_config(disable=True)
    return plain


def fixed_sigmas_scheduler(levels: Sequence[float]) -> diffusers.FlowMatchEulerDiscreteScheduler:
    """The Euler scheduler of diffusers with the fixed sigmas `levels` [T + 1], whatever a pipeline sets."""
    import diffusers

    class FixedSigmasScheduler(diffusers.FlowMatchEulerDiscreteScheduler):
        def set_timesteps(
            self,
            num_inference_steps: int | None = None,
            device: torch.device | None = None,
            sigmas: object = None,
            mu: float | None = None,
        ) -> None:
            """Set the fixed sigmas, unshifted."""
            super().set_timesteps(sigmas=list(levels[:-1]), device=device)

    return FixedSigmasScheduler(shift=1.0)


@torch.no_grad()
def difference(
    pipeline: DiffusersPipeline[DiffusersBundle],
    plain: PlainPipeline,
    texts: Sequence[str],
    params: DiffusionSamplingParams,
    images: Sequence[ConditionImages] | None = None,
    *,
    own_schedule: bool = False,
) -> float:
    """Max abs difference between samples of both from the same noise, by Euler steps on our sigmas.

    Args:
        images: the images of each text. None uses keyed noise if the family needs images.
        own_schedule: diffusers uses the sigmas of its own scheduler, which must be the Euler scheduler.
    """
    samples = sample_with_euler(pipeline, texts, params, images)
    bundle, ours = pipeline.bundle, samples.latents
    if not own_schedule:
        assert samples.params.sigmas is not None
        plain.scheduler = fixed_sigmas_scheduler(samples.params.sigmas)
    with bundle.resident(bundle.frozen), quiet_libraries():
        theirs = pipeline.sample_with_diffusers(plain, texts, samples.x_T.clone(), samples.params, samples.images)
        if theirs.shape != ours.shape:
            ours = pipeline.decoder.decode(ours)
    return float((ours.float() - theirs.float()).abs().max())


@dataclass(frozen=True)
class EulerSamples:
    """The samples of our sampler, and its inputs."""

    latents: Tensor  # [B, *latent]
    x_T: Tensor  # noqa: N815
    params: DiffusionSamplingParams
    """Pinned."""
    images: Sequence[ConditionImages] | None


@torch.no_grad()
def sample_with_euler(
    pipeline: LatentPipeline[LatentBundle],
    texts: Sequence[str],
    params: DiffusionSamplingParams,
    images: Sequence[ConditionImages] | None = None,
) -> EulerSamples:
    """Sample `texts` with our sampler by Euler steps from keyed noise, with keyed images if the family needs images."""
    params = dataclasses.replace(params.deterministic(), solver=None, trajectory_dtype="fp32")
    params = params.pinned(0, tuple(pipeline.sigmas(params).tolist()))
    noise = NoiseSource(params.seed, "eval", 0)
    ids = [f"verify:{i}" for i in range(len(texts))]
    fewest, _ = pipeline.facts.condition_images
    if images is None and fewest:
        pixels = noise.uniform(ids, "p", (fewest, 3, params.height, params.width))
        images = [ConditionImages.of(row.mul(255).round().div(255)) for row in pixels]
    x_T = pipeline.initial_noise(noise, ids, params)  # noqa: N806
    conditions = pipeline.encode(texts, params, images)
    return EulerSamples(pipeline.stage.sample(conditions, x_T, params, noise, ids).final, x_T, params, images)


def unshifted_sigmas(num_inference_steps: int) -> list[float]:
    """The unshifted sigmas 1 - i / T, which a scheduler of diffusers shifts to our schedule."""
    return [1.0 - i / num_inference_steps for i in range(num_inference_steps)]
