"""The domain of text: responses of a language model to prompts, which may show pictures."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.facts import LanguageFacts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams


class TextTrainer(Trainer[ARSamplingParams]):
    """Trains one language model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",))

    track = "text"
    facts: LanguageFacts

    def pinned(self, sampling: ARSamplingParams, step: int) -> ARSamplingParams:
        """As they are: nothing about the sampling of text depends on the step."""
        return sampling
