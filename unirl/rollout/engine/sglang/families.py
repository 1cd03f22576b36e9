"""The model families that SGLang's diffusion server samples in rollout mode, and its form of their latents.

SGLang has the parameters of both families under the names that diffusers gives them, so that weights keep their names.
Each transfer is verified by these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from unirl.config.errors import SyncError, did_you_mean
from unirl.distributed.weight_sync.base import WeightLayout

ADAPTER_TENSOR = re.compile(r"(?P<layer>.+)\.(?P<side>lora_[AB])\.[^.]+\.weight")


@dataclass(frozen=True)
class ServedFamily:
    """One family."""

    model_id: str
    """The name by which SGLang recognises a local folder, for the tiny models of scale=toy."""
    num_text_encoders: int
    sequence_length: int | None
    """The number of text tokens that the server always encodes. None: that of the request."""
    packs: bool
    """Its latents are sequences of tokens [H * W, C] instead of [C, H, W]."""

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
    "sd3": ServedFamily("stable-diffusion-3.5-medium", num_text_encoders=3, sequence_length=256, packs=False),
    "flux2_klein": ServedFamily("FLUX.2-klein-base-4B", num_text_encoders=1, sequence_length=None, packs=True),
}
"""By `ModelFacts.family`."""


def wire_names(layout: WeightLayout, parameters: Mapping[str, object]) -> dict[str, str]:
    """Tensor of a layout to its name in requests: that of diffusers, and for adapters `LAYER.lora_A.weight`.

    SGLang ignores names that it does not know, so every name must be a parameter of the network.

    Args:
        parameters: the parameters of the network by name.

    Raises:
        SyncError: naming a tensor without a parameter.
    """
    wire: dict[str, str] = {}
    for name in layout.tensors:
        match = ADAPTER_TENSOR.fullmatch(name) if layout.payload == "adapter" else None
        if name not in parameters:
            raise SyncError(f"the trainer sends {name!r}, which the network lacks.{did_you_mean(name, parameters)}")
        wire[name] = name if match is None else f"{match['layer']}.{match['side']}.weight"
    return wire
