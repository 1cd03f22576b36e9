"""Text to video with HunyuanVideo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline, unshifted_sigmas
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.hunyuan_video.bundle import HunyuanVideoBundle
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams


class HunyuanVideoPipeline(DiffusersPipeline[HunyuanVideoBundle]):
    """The general pipeline; the scale of a distilled model goes into its network."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """diffusers calls the embedded scale `guidance_scale`, and that of two branches `true_cfg_scale`."""
        embedded = self.bundle.configs.components["transformer"]["guidance_embeds"]
        frames: Tensor = plain(
            prompt=list(texts),
            negative_prompt=[params.negative_prompt] * len(texts),
            max_sequence_length=params.max_sequence_length,
            height=params.height,
            width=params.width,
            num_frames=params.num_frames,
            true_cfg_scale=1.0 if embedded else params.guidance_scale,
            guidance_scale=params.guidance_scale,
            num_inference_steps=params.num_inference_steps,
            sigmas=unshifted_sigmas(params.num_inference_steps),
            latents=x_T,
            output_type="pt",
        ).frames
        return frames.transpose(1, 2)
