"""The text domain: responses of a language model to prompts, which may contain images."""

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
        """Returns the settings unchanged, since the sampling of text does not depend on the step."""
        return sampling
