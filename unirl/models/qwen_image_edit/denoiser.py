"""The MMDiT of Qwen-Image-Edit: Qwen-Image's, which reads images beside the sample."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unirl.models.qwen_image.denoiser import QwenImageDenoiser
from unirl.types.conditions import Conditions, LatentCondition

IMAGE = "image"
"""The condition that holds the latents of images to be edited."""


class QwenImageEditDenoiser(QwenImageDenoiser):
    """One forward of the transformer; images to be edited stand as tokens after the sample's."""

    def references(self, conditions: Conditions) -> Sequence[Tensor]:
        """Latents [B, C, H, W] of each image in `image`."""
        image = conditions.get(IMAGE)
        if image is None:
            return ()
        assert isinstance(image, LatentCondition)
        return image.latents.unbind(1)
