"""The diffusion domain: one denoising track from prompts, which may contain images."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.facts import LatentFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams


class DiffusionTrainer(Trainer[DiffusionSamplingParams]):
    """Trains one denoising model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image", "video"))

    track = "image"  # also for videos
    facts: LatentFacts

    def pinned(self, sampling: DiffusionSamplingParams, step: int) -> DiffusionSamplingParams:
        """Chooses the stochastic steps, and takes the schedule of the recipe or else of the model."""

        def levels(num_steps: int) -> tuple[float, ...]:
            return tuple(self.facts.schedule.sigmas(num_steps, seq_len).tolist())

        if sampling.sigmas is not None:
            return sampling.pinned(step, sampling.sigmas)
        seq_len = self.facts.image_seq_len(sampling)
        return sampling.pinned(step, levels(sampling.num_inference_steps), levels)
