"""The embodied domain: a policy that acts in environments."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.protocols import Capabilities


class EmbodiedTrainer(Trainer):
    """Trains one policy on the episodes of its environments."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("action",))

    track = "action"
