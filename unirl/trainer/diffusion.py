"""The diffusion domain: one denoising track from prompts, which may contain images."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.protocols import Capabilities


class DiffusionTrainer(Trainer):
    """Trains one denoising model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image", "video"))

    track = "image"  # also for videos
