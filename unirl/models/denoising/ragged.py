"""Forwards of a whole batch, for networks of diffusers whose own forward cuts each row to the length of its text.

Cutting needs the lengths on the host, which then waits for the device in every step, and makes the bits of a row depend
on the longest text of its batch. Here the text tokens of all rows keep their padding, which a mask excludes from
attention, and positions are computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from unirl.types.device import to_device


def call(network: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`forward(network, *inputs)` within a call of the network, so that the hooks of FSDP2 around the network run."""
    attributes = vars(network)
    attributes["forward"] = partial(forward, network)
    try:
        output: Tensor = network(*inputs)
    finally:
        del attributes["forward"]
    return output


def patches(latents: Tensor, size: int) -> Tensor:
    """[B, H W / p^2, p^2 C] tokens of latents [B, C, H, W]. The numbers of a token are ordered row, column, channel."""
    rows, columns = (side // size for side in latents.shape[-2:])
    cut = latents.unflatten(3, (columns, size)).unflatten(2, (rows, size))
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatched(tokens: Tensor, latent_shape: torch.Size, size: int) -> Tensor:
    """Latents [B, C, H, W] of their tokens; `latent_shape` ends with (C, H, W)."""
    channels, *sides = latent_shape[-3:]
    rows, columns = (side // size for side in sides)
    cut = tokens.unflatten(2, (size, size, channels)).unflatten(1, (rows, columns))
    return cut.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class Rotations:
    """Rotary embeddings of tokens that have a position along each of several axes."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        """
        Args:
            tables: complex rotations [positions, d] of each axis. They are copied to a device once.
        """
        self.tables = [table.to(torch.complex64) for table in tables]

    def at(self, *positions: Tensor) -> Tensor:
        """[B, L, sum d] rotations of tokens at `positions`: for each axis [B, L], or [1, L] if all rows agree."""
        if self.tables[0].device != positions[0].device:
            self.tables = [to_device(table, positions[0].device) for table in self.tables]
        parts = [table[position] for table, position in zip(self.tables, positions, strict=True)]
        batch = max(len(part) for part in parts)
        return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=-1)

    def of_text(self, length: int, start: int, device: torch.device) -> Tensor:
        """[1, L, d] rotations of `length` text tokens, whose first position along axis 0 is `start`."""
        positions = torch.arange(start, start + length, device=device)[None]
        origin = torch.zeros_like(positions)
        return self.at(positions, origin, origin)

    def of_image(self, start: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, d] rotations of image tokens, whose position along axis 0 is `start` [B] in every row."""
        across = torch.arange(columns, device=start.device).repeat(rows)
        down = torch.arange(rows, device=start.device)[:, None].expand(-1, columns).flatten()
        return self.at(start[:, None].expand(-1, rows * columns), down[None], across[None])
