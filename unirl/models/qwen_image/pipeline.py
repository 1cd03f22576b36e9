"""Text to image with Qwen-Image."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.models.qwen_image.denoiser import packed
from unirl.models.qwen_image.templates import written
from unirl.types.sampling import DiffusionSamplingParams


class QwenImagePipeline(DiffusersPipeline[QwenImageBundle]):
    """Guidance, schedule and conditioning are the general ones."""

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels [B, 3, H, W]."""
        return drawn(plain, texts, x_T, params)


def drawn(
    plain: PlainPipeline,
    texts: Sequence[str],
    x_T: Tensor,  # noqa: N803
    params: DiffusionSamplingParams,
    **images: object,
) -> Tensor:
    """Pixels [B, 3, H, W] that a pipeline of Qwen-Image draws with our settings; `images` are what it is shown."""
    prompts: dict[str, object] = {"prompt": [written(text) for text in texts]}
    if params.guidance_scale != 1:
        prompts["negative_prompt"] = [written(params.negative_prompt)] * len(texts)
    pixels: Tensor = plain(
        **prompts,
        **images,
        true_cfg_scale=params.guidance_scale,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        sigmas=unshifted_sigmas(params.num_inference_steps),
        latents=packed(x_T, 2),  # as diffusers has it, whatever the configuration says
        max_sequence_length=params.max_sequence_length,
        output_type="pt",
    ).images
    return pixels
