"""Text to image with Lumina-Image 2.0."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, base_grid
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.lumina2.bundle import Lumina2Bundle
from unirl.models.lumina2.text import TEMPLATE
from unirl.types.conditions import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class Lumina2Pipeline(DiffusersPipeline[Lumina2Bundle]):
    """Prompts stand in the template that the model was trained with, negative prompts stand alone."""

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        return super().encode([TEMPLATE + text for text in texts], params, images)

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
            negative_prompt=[params.negative_prompt] * len(texts),
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=base_grid(params.num_inference_steps),
            latents=x_T,
            max_sequence_length=params.max_sequence_length,
            output_type="pt",
        ).images
        return drawn
