"""Text to image with Z-Image."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, base_grid
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.z_image.bundle import ZImageBundle
from unirl.types.sampling import DiffusionSamplingParams


class ZImagePipeline(DiffusersPipeline[ZImageBundle]):
    """Z-Image's guidance and schedule are the general ones."""

    def draw(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """diffusers adds guidance_scale (v_cond - v_uncond) to v_cond: its scale is ours less 1."""
        drawn: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            max_sequence_length=params.max_sequence_length,
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale - 1.0,
            num_inference_steps=params.num_inference_steps,
            sigmas=base_grid(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).images
        return drawn
