"""The model families that SGLang's diffusion server samples in rollout mode, and its form of their latents.

SGLang has the parameters of these families under the names that diffusers gives them, except those of fused layers.
Each transfer is verified by the names of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unirl.models.denoising.packing import packed, unpacked
from unirl.rollout.engine.serving.latent_server import LatentFamily
from unirl.types.facts import LatentFacts
from unirl.types.protocols import SigmaGrid


@dataclass(frozen=True, kw_only=True)
class ServedFamily(LatentFamily):
    """One family."""

    model_id: str
    """The name by which SGLang recognises a local folder, for the tiny models of scale=toy."""
    num_text_encoders: int = 1
    extra_tokens: int = 0
    """Tokens that the server counts in addition to those of the request, such as the opening of a chat."""
    grid: SigmaGrid = "clean"
    """The noise levels before the shift. The server takes none, and makes its own."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A layer of SGLang to the layers of diffusers whose rows it joins, in order."""

    def served(self, facts: LatentFacts) -> LatentFacts:
        """The facts of the model, with the schedule of the server."""
        return replace(facts, schedule=facts.schedule.on_grid(self.grid))

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The server's shape of latents [C, H, W]."""
        if self.token_side is None:
            return tuple(shape)
        channels, height, width = shape
        area = self.token_side**2
        return height * width // area, channels * area

    def packed(self, latents: Tensor) -> Tensor:
        """Latents [..., C, H, W] in the form of the server."""
        return latents if self.token_side is None else packed(latents, self.token_side).contiguous()

    def unpacked(self, latents: Tensor, shape: Sequence[int]) -> Tensor:
        """Latents of the server as [..., C, H, W]."""
        return latents if self.token_side is None else unpacked(latents, shape, self.token_side).contiguous()

    def joined(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors by the names of the server, and those that wait for the other parts of a fused layer.

        Joined tensors are in main memory, since their parts may be on different devices.
        """
        whole, waiting = {}, dict(tensors)
        for name in tensors:
            layer, _, leaf = name.rpartition(".")
            head, _, last = layer.rpartition(".")
            group = next(((own, parts) for own, parts in self.fused.items() if last in parts), None)
            if group is None:
                whole[name] = waiting.pop(name)
                continue
            own, parts = group
            names = [f"{head}.{part}.{leaf}" for part in parts]
            if last == parts[-1] and all(each in tensors for each in names):
                whole[f"{head}.{own}.{leaf}"] = torch.cat([waiting.pop(each).cpu() for each in names])
        return whole, waiting


FAMILIES: Mapping[str, ServedFamily] = {
    "sd3": ServedFamily(
        model_id="stable-diffusion-3.5-medium", num_text_encoders=3, sequence_length=256, grid="diffusers"
    ),
    "flux2_klein": ServedFamily(model_id="FLUX.2-klein-base-4B", sequence_length=512, token_side=1),
    "qwen_image": ServedFamily(
        model_id="Qwen-Image",
        extra_tokens=34,
        blank=" ",
        token_side=2,
        fused={"to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")},
    ),
}
"""By `ModelFacts.family`."""
