"""The attention of images to their own tokens and to the text before them, with images and texts in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import ROW_PAD_MULTIPLE, softmax_attention
from unirl.types.device import to_device
from unirl.types.rows import rows_by_key


@dataclass(frozen=True)
class ImageGroup:
    """Rows whose texts are padded to the same length. A row's bits then depend on its own length alone."""

    rows: Tensor  # [b] int64
    text: Tensor  # [b, W] int64, the packed text token at each place
    mask: Tensor | None  # [b, 1, 1, W + I], True at real tokens. None without text


class ImageAttention:
    """Each token of an image sees the whole image and the whole text of its row. Texts are packed end to end."""

    def __init__(self, lengths: Sequence[int], num_image_tokens: int, device: torch.device) -> None:
        """
        Args:
            lengths: text tokens of each row; 0 without text.
            num_image_tokens: I, the tokens of each image.
        """
        # Everything is computed here, before the layers run, because their compiled forms only read it.
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.groups: list[ImageGroup] = []
        order: list[int] = []
        for width, rows in rows_by_key(round_up(length, ROW_PAD_MULTIPLE) for length in lengths).items():
            places = torch.arange(width)
            is_real = places < torch.tensor(lengths)[rows, None]
            tokens = torch.where(is_real, starts[rows, None] + places, starts[rows, None])
            seen = torch.cat([is_real, torch.ones(len(rows), num_image_tokens, dtype=torch.bool)], dim=1)
            mask = to_device(seen[:, None, None], device) if width else None
            self.groups.append(ImageGroup(to_device(torch.tensor(rows), device), to_device(tokens, device), mask))
            order += rows
        self.place_of_row = to_device(torch.tensor(order).argsort(), device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, text_key: Tensor, text_value: Tensor, scale: float
    ) -> Tensor:
        """[B, I, H, d] from query [B, I, H, d], key and value [B, I, K, d], and those of packed texts [N, K, d]."""
        images = []
        for group in self.groups:
            k, v = (
                torch.cat([packed[group.text], own[group.rows]], dim=1).transpose(1, 2)
                for packed, own in ((text_key, key), (text_value, value))
            )
            attended = softmax_attention(query[group.rows].transpose(1, 2), k, v, scale, group.mask)
            images.append(attended.transpose(1, 2))
        return torch.cat(images).index_select(0, self.place_of_row)
