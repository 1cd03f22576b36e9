"""The diffusion domain: one denoising track from text prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from unirl.data.datasets import Prompt, require_text_only
from unirl.trainer.base import Trainer
from unirl.types.batch import Batch
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Texts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import DiffusionSamplingParams


class DiffusionTrainer(Trainer[DiffusionSamplingParams]):
    """Trains one denoising model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image", "video"))

    track = "image"
    facts: LatentFacts

    def primitives(self, prompts: Sequence[Prompt]) -> dict[str, Batch]:
        require_text_only(prompts, self.facts.family)
        return {"text": Texts(texts=[prompt.text for prompt in prompts])}

    def pinned(self, sampling: DiffusionSamplingParams, step: int) -> DiffusionSamplingParams:
        """Stochastic steps are chosen; the schedule is the recipe's own, else the model's."""

        def levels(num_steps: int) -> tuple[float, ...]:
            return tuple(self.facts.schedule.sigmas(num_steps, seq_len).tolist())

        if sampling.sigmas is not None:
            return sampling.pinned(step, sampling.sigmas)
        seq_len = self.facts.image_seq_len(sampling.height, sampling.width)
        return sampling.pinned(step, levels(sampling.num_inference_steps), levels)
