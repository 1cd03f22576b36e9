"""Text to image, and images edited by text, with FLUX.2-klein."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.text import stacked_layers
from unirl.types.sampling import DiffusionSamplingParams


class Flux2KleinPipeline(DiffusersPipeline[Flux2KleinBundle]):
    """Guidance and schedule are the general ones."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """One by one where there are images: diffusers shows the same ones to all texts of a call."""
        if images is None:
            return self._draw(plain, texts, x_T, params)
        rows = [
            self._draw(plain, [text], x_T[i : i + 1], params, image=_images(shown))
            for i, (text, shown) in enumerate(zip(texts, images, strict=True))
        ]
        return torch.cat(rows)

    def _draw(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        **image: Any,
    ) -> Tensor:
        layers = stacked_layers(plain.text_encoder.config.num_hidden_layers)
        reading = {"max_sequence_length": params.max_sequence_length, "text_encoder_out_layers": layers}
        drawn: Tensor = plain(
            **image,
            prompt=list(texts),
            negative_prompt_embeds=plain.encode_prompt([params.negative_prompt] * len(texts), **reading)[0],
            **reading,
            height=params.height,
            width=params.width,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).images
        return drawn


def _images(shown: ConditionImages) -> list[Any]:
    """As PIL's."""
    from PIL import Image

    pixels = shown.pixels.mul(255).round().to(torch.uint8)
    return [Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()) for image in pixels]
