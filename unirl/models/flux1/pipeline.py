"""Text to image with FLUX.1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, base_grid
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.flux1.bundle import Flux1Bundle
from unirl.models.flux1.denoiser import tokens_of
from unirl.types.sampling import DiffusionSamplingParams


class Flux1Pipeline(DiffusersPipeline[Flux1Bundle]):
    """The guidance scale is an input of the network; a negative prompt is not read."""

    def draw(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        drawn: Tensor = plain(
            prompt=list(texts),
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=base_grid(params.num_inference_steps),
            latents=tokens_of(x_T),
            max_sequence_length=params.max_sequence_length,
            output_type="pt",
        ).images
        return drawn
