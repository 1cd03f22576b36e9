"""Z-Image's transformer as a velocity field. Alibaba 2025 (arXiv:2511.22699).

The network takes lists: each row has its own number of text tokens, filled to a multiple of 32 by a learned token that
it attends to, and the image stands behind them. diffusers pads shorter rows to the longest of the batch, and masks
only where rows differ; here all are padded to what the longest prompt could need, and always masked. Otherwise a row's
bits would depend on its neighbours, and a replay's micro-batches differ from the rollout's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.types.conditions import Conditions, TextEmbedCondition

TEXT_MULTIPLE = 32


class ZImageDenoiser:
    """One forward of the transformer."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer  # diffusers' ZImageTransformer2DModel, which has no types
        self.padding = EqualLengths.of(transformer)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] and sigma [B], given the condition `text`."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition) and text.mask is not None
        dtype = self.transformer.cap_embedder[1].weight.dtype
        self.padding.text_length = -(-text.embeds.shape[1] // TEXT_MULTIPLE) * TEXT_MULTIPLE
        toward_data = self.transformer(
            list(x.to(dtype)[:, :, None]),
            1.0 - sigma,
            [tokens[real] for tokens, real in zip(text.embeds.to(dtype), text.mask, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(toward_data)[:, :, 0].float()


class EqualLengths:
    """The padding of a transformer, in place of its own: to the length of the longest row that there could be."""

    @classmethod
    def of(cls, transformer: Any) -> EqualLengths:
        """The one of a transformer, which may have several denoisers."""
        replaced = vars(transformer).get("_prepare_sequence")
        return cls(transformer) if replaced is None else replaced.__self__

    def __init__(self, transformer: Any) -> None:
        self.text_length = 0
        self._prepare = type(transformer)._prepare_sequence
        self._join = type(transformer)._build_unified_sequence
        self._transformer = transformer
        transformer._prepare_sequence = self._prepared
        transformer._build_unified_sequence = self._joined

    def _prepared(
        self, feats: Any, pos_ids: Any, inner_pad_mask: Any, pad_token: Any, *others: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Tokens [B, L, D], rotations [B, L, d], mask [B, L], lengths, and what is not used, of image or text."""
        tokens, rotations, _, lengths, rest = self._prepare(
            self._transformer, feats, pos_ids, inner_pad_mask, pad_token, *others
        )
        whole = self.text_length if pad_token is self._transformer.cap_pad_token else tokens.shape[1]
        return *padded(tokens, rotations, lengths, whole), lengths, rest

    def _joined(self, x: Any, x_rotations: Any, x_lengths: Any, *others: Any) -> tuple[Any, Any, Any, Any]:
        """Tokens, rotations, mask, and what is not used, of images with their texts behind them."""
        text_lengths = others[3]
        tokens, rotations, _, rest = self._join(self._transformer, x, x_rotations, x_lengths, *others)
        lengths = [image + text for image, text in zip(x_lengths, text_lengths, strict=True)]
        return *padded(tokens, rotations, lengths, x.shape[1] + self.text_length), rest


def padded(tokens: Tensor, rotations: Tensor, lengths: list[int], whole: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, whole, D] and rotations [B, whole, d] with zeros behind, and what is real [B, whole]."""
    missing = (0, 0, 0, whole - tokens.shape[1])
    ends = torch.tensor(lengths, device=tokens.device)[:, None]
    return pad(tokens, missing), pad(rotations, missing), torch.arange(whole, device=tokens.device) < ends
