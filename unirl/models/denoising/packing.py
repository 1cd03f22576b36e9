"""The packing of latents into the tokens of a transformer. It needs torch alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def packed(latents: Tensor, patch_size: int) -> Tensor:
    """[..., H W / p^2, C p^2] tokens of latents [..., C, H, W]. The order within a token is channel, row, column."""
    return pixel_unshuffle(latents, patch_size).flatten(-2).transpose(-1, -2)


def unpacked(tokens: Tensor, latent_shape: Sequence[int], patch_size: int) -> Tensor:
    """Latents [..., C, H, W] of their tokens; `latent_shape` ends with (H, W)."""
    rows, columns = (side // patch_size for side in latent_shape[-2:])
    return pixel_shuffle(tokens.transpose(-1, -2).unflatten(-1, (rows, columns)), patch_size)
