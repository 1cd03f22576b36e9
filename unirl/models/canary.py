"""What two networks are asked that should hold the same weights, and what one of them says.

A pipeline makes the question (`canary_inputs`), with its own encoders where it has some; a stage answers it (`canary`)
in one small forward through every weight that is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unirl.types.batch import Batch, row

PROMPTS = ("a canary in a coal mine", "a yellow bird", "an empty cage", "")
IDS = tuple(f"canary:{i}" for i in range(len(PROMPTS)))


@dataclass(kw_only=True, eq=False)
class CanaryAnswer(Batch):
    """What a network says."""

    values: Tensor = row(heavy=True)  # [B, ...] fp32


@dataclass(kw_only=True, eq=False)
class LatentCanary(Batch):
    """What a denoiser is asked."""

    x: Tensor = row(heavy=True)  # [B, *latent]
    sigma: Tensor = row(heavy=True)  # [B]
    conditions: dict[str, Batch] = row()
