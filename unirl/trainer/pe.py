"""Prompt enhancement: a language model and the diffusion model that draws its rewrites, trained together."""

from __future__ import annotations

from typing import ClassVar

from unirl.trainer.loop import Trainer
from unirl.types.protocols import Capabilities


class PETrainer(Trainer):
    """Trains a rewriter and a diffusion model. The rewards of the samples of a rewrite credit the rewrite."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text", "image", "video"))

    track = "diffusion"
    num_tracks = "several"
