"""The text domain: responses of a language model to prompts, which may contain images."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.protocols import Capabilities


class TextTrainer(Trainer):
    """Trains one language model."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",))

    track = "text"
