"""The model families that SGLang's diffusion server samples in rollout mode, and its form of their latents.

SGLang has the parameters of both families under the names that diffusers gives them, so that weights keep their names.
Each transfer is verified by these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from unirl.distributed.weight_sync.base import WeightLayout
from unirl.rollout.engine.sglang_llm.names import ADAPTER_TENSOR
from unirl.types.facts import LatentFacts
from unirl.types.protocols import SigmaGrid


@dataclass(frozen=True)
class ServedFamily:
    """One family."""

    model_id: str
    """The name by which SGLang recognises a local folder, for the tiny models of scale=toy."""
    num_text_encoders: int
    sequence_length: int | None
    """The number of text tokens that the server always encodes. None: that of the request."""
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


def wire_names(layout: WeightLayout) -> dict[str, str]:
    """Tensor of a layout to its name in requests: that of diffusers, and for adapters `LAYER.lora_A.weight`."""
    wire: dict[str, str] = {}
    for name in layout.tensors:
        match = ADAPTER_TENSOR.fullmatch(name) if layout.payload == "adapter" else None
        wire[name] = name if match is None else f"{match['layer']}.{match['side']}.weight"
    return wire
