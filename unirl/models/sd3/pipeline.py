"""Text to image with Stable Diffusion 3: the general pipeline over an SD3 bundle, and its way out to diffusers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from unirl.models.pipeline import DiffusionPipeline
from unirl.models.sd3 import export
from unirl.models.sd3.bundle import SD3Bundle
from unirl.types.sampling import DiffusionSamplingParams


class SD3Pipeline(DiffusionPipeline[SD3Bundle]):
    """SD3's guidance, schedule and conditioning are the general ones."""

    lora_formats: ClassVar[tuple[str, ...]] = ("diffusers-lora", "peft")

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """A diffusers directory of the model whose transformer has `tensors` in place of its own."""
        return export.write_model(self.bundle, tensors, folder)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between our sampler and diffusers' with the adapter in `folder`."""
        return export.verify_lora(self, folder, texts, params)

    def verify_model(self, folder: Path, texts: Sequence[str], params: DiffusionSamplingParams) -> float:
        """Max abs difference between our sampler and diffusers' with the model in `folder`."""
        return export.verify_model(self, folder, texts, params)
