"""Videos from text, or from text and a first frame, with Wan 2.2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import PlainPipeline, without_bar
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.loading.adapter_files import DIFFUSERS_FILE, Adapter, write_diffusers_lora
from unirl.models.wan21.pipeline import WanVideoPipeline
from unirl.models.wan22.bundle import Wan22Bundle
from unirl.models.wan22.family import HIGH, LOW
from unirl.types.sampling import DiffusionSamplingParams

FILES = {HIGH: DIFFUSERS_FILE, LOW: "pytorch_lora_weights_2.safetensors"}
"""Of the experts' adapters. In diffusers:

pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights_2.safetensors", load_into_transformer_2=True)
"""


class Wan22Pipeline(WanVideoPipeline[Wan22Bundle]):
    """Wan 2.2."""

    lora_formats: ClassVar[tuple[str, ...]] = ("diffusers-lora",)

    def sample_with_diffusers(
        self,
        plain: PlainPipeline,
        texts: Sequence[str],
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Tensor:
        """Pixels [B, 3, F, H, W]. diffusers shows the 5B model a first frame by another pipeline of the same parts."""
        if images is not None and not self.bundle.has_experts:
            plain = _shown(plain)
        return super().sample_with_diffusers(plain, texts, x_T, params, images)

    def settings(self, params: DiffusionSamplingParams) -> Mapping[str, Any]:
        """With the second expert's guidance."""
        settings = super().settings(params)
        if not self.bundle.has_experts:
            return settings
        first = params.guidance_scale
        second = first if params.guidance_scale_2 is None else params.guidance_scale_2
        if first == 1.0 and second != 1.0:
            first = math.nextafter(1.0, 2.0)  # diffusers guides neither expert where the first scale is 1
        return {**settings, "guidance_scale": first, "guidance_scale_2": second}

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """A file, or one of each expert in `folder`."""
        if not self.bundle.has_experts:
            return super().write_lora(folder, adapter)
        for part, file in FILES.items():
            layers = {
                name.removeprefix(f"{part}."): pair
                for name, pair in adapter.layers.items()
                if name.startswith(f"{part}.")
            }
            write_diffusers_lora(folder, replace(adapter, layers=layers), file=file)
        return folder

    def load_lora(self, plain: PlainPipeline, folder: Path) -> None:
        """As a user of diffusers does."""
        if not self.bundle.has_experts:
            return super().load_lora(plain, folder)
        for part, file in FILES.items():
            plain.load_lora_weights(str(folder), weight_name=file, load_into_transformer_2=part == LOW)


def _shown(plain: PlainPipeline) -> PlainPipeline:
    """The pipeline of image to video with the parts of one of text to video."""
    import diffusers

    return without_bar(diffusers.WanImageToVideoPipeline(**plain.components, expand_timesteps=True))
