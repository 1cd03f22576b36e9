"""The model families that SGLang's diffusion server samples in rollout mode, and its form of their latents.

SGLang has the parameters of both families under the names that diffusers gives them, so that weights keep their names.
Each transfer is verified by these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from unirl.rollout.engine.serving.latent_server import LatentFamily
from unirl.types.facts import LatentFacts
from unirl.types.protocols import SigmaGrid


@dataclass(frozen=True)
class ServedFamily(LatentFamily):
    """One family."""

    model_id: str
    """The name by which SGLang recognises a local folder, for the tiny models of scale=toy."""
    num_text_encoders: int
    grid: SigmaGrid
    """The noise levels before the shift. The server takes none, and makes its own."""
    packs: bool
    """Its latents are sequences of tokens [H * W, C] instead of [C, H, W]."""

    def served(self, facts: LatentFacts) -> LatentFacts:
        """The facts of the model, with the schedule of the server."""
        return replace(facts, schedule=facts.schedule.on_grid(self.grid))

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The server's shape of latents [C, H, W]."""
        channels, height, width = shape
        return (height * width, channels) if self.packs else (channels, height, width)

    def packed(self, latents: Tensor) -> Tensor:
        """Latents [..., C, H, W] in the form of the server."""
        return latents.flatten(-2).transpose(-1, -2).contiguous() if self.packs else latents

    def unpacked(self, latents: Tensor, shape: Sequence[int]) -> Tensor:
        """Latents of the server as [..., C, H, W]."""
        if not self.packs:
            return latents
        _, height, width = shape
        return latents.transpose(-1, -2).unflatten(-1, (height, width)).contiguous()


FAMILIES: Mapping[str, ServedFamily] = {
    "sd3": ServedFamily(
        "stable-diffusion-3.5-medium", num_text_encoders=3, sequence_length=256, grid="diffusers", packs=False
    ),
    "flux2_klein": ServedFamily(
        "FLUX.2-klein-base-4B", num_text_encoders=1, sequence_length=512, grid="clean", packs=True
    ),
}
"""By `ModelFacts.family`."""
