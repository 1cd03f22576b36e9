"""The domain of unified models: one network that writes text and draws images."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.protocols import Capabilities


class UnifiedModelTrainer(Trainer):
    """Trains one network on its images and, if the recipe has tracks of text, on the text that leads to each image."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image",))

    track = "image"
    num_tracks = "any"
