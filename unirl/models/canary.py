"""A fixed input whose velocity tells two networks apart: one small forward through every weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.diffusion import DiffusionStage
from unirl.models.embeddings import PromptEmbeddings
from unirl.models.guidance import Guidance
from unirl.sde.noise import NoiseSource
from unirl.types.batch import Batch, row
from unirl.types.facts import LatentFacts

PROMPTS = ("a canary in a coal mine", "a yellow bird", "an empty cage", "")
IDS = tuple(f"canary:{i}" for i in range(len(PROMPTS)))
SIGMA = 0.5
SIDE_TOKENS = 4
MAX_SEQUENCE_LENGTH = 32


@dataclass(kw_only=True, eq=False)
class CanaryInputs(Batch):
    """What both networks are asked."""

    x: Tensor = row(heavy=True)  # [B, *latent]
    sigma: Tensor = row(heavy=True)  # [B]
    conditions: dict[str, Batch] = row()


@dataclass(kw_only=True, eq=False)
class CanaryAnswer(Batch):
    """What one of them says."""

    velocity: Tensor = row(heavy=True)  # [B, *latent] fp32


def canary_inputs(embed: PromptEmbeddings, facts: LatentFacts) -> CanaryInputs:
    """Fixed prompts as `embed` encodes them, keyed noise on a latent of 4 x 4 tokens, and sigma 0.5."""
    side = SIDE_TOKENS * facts.vae_scale * facts.patch_size
    x = NoiseSource(0, "eval", 0).normal(list(IDS), "x", facts.latent_shape(side, side))
    return CanaryInputs(
        x=x,
        sigma=torch.full((len(PROMPTS),), SIGMA),
        conditions={"text": embed(PROMPTS, MAX_SEQUENCE_LENGTH)},
    )


class VelocityCanary:
    """Answers with a stage's velocity, without guidance."""

    def __init__(self, stage: DiffusionStage) -> None:
        self.stage = stage
        self.compute = stage.autocast_dtype

    @torch.no_grad()
    def answer(self, inputs: CanaryInputs) -> CanaryAnswer:
        """The velocity at `inputs`, which are on the network's device.

        Compiled blocks run uncompiled: this compares weights, and two compilers need not round alike.
        """
        with torch.compiler.set_stance("force_eager"):
            return CanaryAnswer(velocity=self.stage.velocity(inputs.x, inputs.sigma, inputs.conditions, Guidance()))
