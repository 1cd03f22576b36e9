"""How the tokens of one forward see each other: said by an object that is handed down to every layer, not by masks.

    rows end to end   [a0 a1 a2 | b0 b1 | c0 ...]    each row causal and blind to the others
    one step          [a3 | b2 | c7]                 each token sees what its row has in a cache (models/decoding.py)

transformers calls the function that is registered here in place of its own; a network that computes with it takes the
keyword `attend` in its decoder's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "unirl"
"""The name that transformers knows it by."""


class Attend(Protocol):
    """What the tokens of one forward see. Called by every layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d] from query [N, H, d], key and value [N, K, d] of the N tokens; K key heads divide H."""
        ...


class PackedRows:
    """Rows end to end: a token sees the earlier ones of its own row, and itself."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = [length for length in lengths if length]
        self._bounds: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if has_varlen(query):
            return causal_rows(query, key, value, self._row_bounds(query.device), max(self.lengths), scale)
        rows = zip(*(tensor.split(self.lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([causal_row(q, k, v, scale) for q, k, v in rows])

    def _row_bounds(self, device: torch.device) -> Tensor:
        if self._bounds is None:
            ends = list(accumulate(self.lengths, initial=0))
            self._bounds = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._bounds


def causal_row(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[L, H, d] of one row."""
    key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)
    return out[0].transpose(0, 1)


def has_varlen(query: Tensor) -> bool:
    """Whether one kernel can run ragged rows of `query` [N, H, d]."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return (
        query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def causal_rows(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """[N, H, d] of rows that begin and end at `bounds` [B + 1] int32."""
    from torch.nn.attention.varlen import varlen_attn

    key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values [N, K, d] as [N, H, d]: a key head serves adjacent query heads."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attend: Attend,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call: [1, N, H, d] from query [1, H, N, d], key and value [1, K, N, d]."""
    if sliding_window is not None:
        raise ValueError(f"{type(module).__name__} sees {sliding_window} tokens back; only full attention is written")
    layer: Any = module.layer_idx
    # Under autocast, normed queries and keys are wider than values; attention computes in the narrow type.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attend(layer, q, k, v, scaling)[None], None


@cache
def register_attention() -> None:
    """Make the function known to transformers as `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
