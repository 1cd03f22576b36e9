"""The domain of text: responses of a language model to prompts, which may show pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from unirl.data.datasets import Prompt, require_text_only
from unirl.trainer.base import Trainer
from unirl.types.batch import Batch
from unirl.types.facts import LanguageFacts
from unirl.types.primitives import PromptImages, Texts
from unirl.types.protocols import Capabilities
from unirl.types.sampling import ARSamplingParams


class TextTrainer(Trainer[ARSamplingParams]):
    """Trains one language model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",))

    track = "text"
    facts: LanguageFacts

    def primitives(self, prompts: Sequence[Prompt]) -> dict[str, Batch]:
        """Texts, and pictures where any prompt of the request shows some."""
        if not self.facts.sees:
            require_text_only(prompts, self.facts.family)
        found: dict[str, Batch] = {"text": Texts(texts=[prompt.text for prompt in prompts])}
        if any(prompt.images for prompt in prompts):
            found["images"] = PromptImages(refs=[prompt.images for prompt in prompts])
        return found

    def pinned(self, sampling: ARSamplingParams, step: int) -> ARSamplingParams:
        """As they are: nothing about the sampling of text depends on the step."""
        return sampling
