"""Videos from text, or from text and a first frame, with Wan 2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline, PlainPipeline
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.pipeline import VIDEO
from unirl.models.images import to_pil
from unirl.models.wan21.bundle import Wan21Bundle, WanBundle
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams

WanBundleT = TypeVar("WanBundleT", bound=WanBundle)


class WanVideoPipeline(DiffusersPipeline[WanBundleT]):
    """What Wan 2.1 and 2.2 share. Guidance, schedule and conditioning are the general ones."""

    capabilities: ClassVar[Capabilities] = VIDEO

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels [B, 3, F, H, W].

        diffusers takes one first frame a call, so rows with one are drawn by themselves. It is given our embeddings,
        since its image pipeline cleans texts by ftfy without asking whether that is installed.
        """
        settings = self.settings(params)
        if images is None:
            negatives = [params.negative_prompt] * len(texts)
            frames = plain(prompt=list(texts), negative_prompt=negatives, latents=x_T, **settings).frames
        else:
            *embeds, negative = self.embed([*texts, params.negative_prompt], params.max_sequence_length).embeds.split(1)
            settings = {**settings, "negative_prompt_embeds": negative}
            rows = [
                plain(image=to_pil(shown.pixels[0]), prompt_embeds=text, latents=x, **settings).frames
                for text, x, shown in zip(embeds, x_T.split(1), images, strict=True)
            ]
            frames = torch.cat(rows)
        videos: Tensor = frames.transpose(1, 2)
        return videos

    def settings(self, params: DiffusionSamplingParams) -> Mapping[str, Any]:
        """How diffusers is told what is the same in every call."""
        return {
            "height": params.height,
            "width": params.width,
            "num_frames": params.num_frames,
            "num_inference_steps": params.num_inference_steps,
            "guidance_scale": params.guidance_scale,
            "max_sequence_length": params.max_sequence_length,
            "output_type": "pt",
        }


class Wan21Pipeline(WanVideoPipeline[Wan21Bundle]):
    """Wan 2.1."""
