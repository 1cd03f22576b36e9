"""Text to image with Stable Diffusion 3."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, base_grid
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.family import ENCODERS
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams


class SD3Pipeline(DiffusersPipeline[SD3Bundle]):
    """SD3's guidance, schedule and conditioning are the general ones."""

    def draw(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Of a model without all encoders or a VAE: latents, given our embeddings."""
        whole = all(name in self.bundle.modules for name in (*ENCODERS, "vae"))
        drawn: Tensor = plain(
            **(_prompts(texts, params) if whole else self._embeddings(texts, params)),
            # Only checked, since the latents are given; diffusers assumes 8 pixels per latent element.
            height=x_T.shape[-2] * plain.vae_scale_factor,
            width=x_T.shape[-1] * plain.vae_scale_factor,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=base_grid(params.num_inference_steps),
            latents=x_T,
            output_type="pt" if whole else "latent",
        ).images
        return drawn

    def _embeddings(self, texts: Sequence[str], params: DiffusionSamplingParams) -> dict[str, Tensor | None]:
        length = params.max_sequence_length
        positive, negative = self.embed(texts, length), self.embed([params.negative_prompt] * len(texts), length)
        return {**_embedded("", positive), **_embedded("negative_", negative)}


def _prompts(texts: Sequence[str], params: DiffusionSamplingParams) -> dict[str, object]:
    return {
        "prompt": list(texts),
        "negative_prompt": [params.negative_prompt] * len(texts),
        "max_sequence_length": params.max_sequence_length,
    }


def _embedded(prefix: str, condition: TextEmbedCondition) -> dict[str, Tensor | None]:
    return {f"{prefix}prompt_embeds": condition.embeds, f"{prefix}pooled_prompt_embeds": condition.pooled}
