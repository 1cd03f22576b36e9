"""Text to video with HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle
from unirl.models.hunyuan_video15.text import glyph_tokens
from unirl.models.loading.adapter_files import DIFFUSERS_FILE
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams


class HunyuanVideo15Pipeline(DiffusersPipeline[HunyuanVideo15Bundle]):
    """The general pipeline; diffusers keeps guidance and lengths in its pipeline instead of taking them by call."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """diffusers' pipeline loads no adapters; its transformer does."""
        plain.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE)

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """With a guider of our scale."""
        plain.guider = plain.guider.new(guidance_scale=params.guidance_scale)
        plain.tokenizer_max_length = params.max_sequence_length
        plain.tokenizer_2_max_length = glyph_tokens(self.bundle.tokenizers["tokenizer_2"])
        plain.vae.enable_slicing()
        frames: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            height=params.height,
            width=params.width,
            num_frames=params.num_frames,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).frames
        return frames.transpose(1, 2)
