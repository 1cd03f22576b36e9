"""How the tokens of one forward see each other: said by an object that is handed down to every layer, not by masks.

    rows end to end   [a0 a1 a2 | b0 b1 | c0 ...]    each row causal and blind to the others
    one step          [a3 | b2 | c7]                 each token sees what its row has in a cache (models/decoding.py)

transformers calls the function that is registered here in place of its own; a network that computes with it takes the
keyword `attention_fn` in its decoder's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unirl.models.chunks import round_up

ATTENTION = "unirl"
"""The name that transformers knows it by."""
CPU = torch.device("cpu")
FILL = 16
"""Rows whose lengths are the same when rounded up to a multiple of this run side by side."""


class AttentionFn(Protocol):
    """What the tokens of one forward see. Called by every layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d] from query [N, H, d], key and value [N, K, d] of the N tokens; K key heads divide H."""
        ...


class PackedAttention:
    """Rows end to end: a token sees the earlier ones of its own row, and itself."""

    def __init__(self, lengths: Sequence[int], device: torch.device = CPU) -> None:
        lengths = [length for length in lengths if length]
        # All of it here, before the layers run: their compiled forms only read it.
        self.longest = max(lengths)
        self.bounds = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
        self.blocks = PaddedGroups.of(lengths, device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if has_varlen(query):
            return causal_rows(query, key, value, self.bounds, self.longest, scale)
        return self.blocks(query, key, value, scale)


@dataclass(frozen=True)
class PaddedGroups:
    """Rows of about the same length side by side, filled up behind their ends, where no token of theirs looks."""

    taken: list[Tensor]  # [B, W] each, which token stands where
    back: Tensor  # [N] where each token stands in the blocks laid end to end

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> PaddedGroups:
        """The blocks of rows of `lengths` that lie end to end."""
        widths: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            widths.setdefault(round_up(length, FILL), []).append(row)
        ends = torch.tensor(lengths).cumsum(0)
        taken, back, before = [], torch.empty(int(ends[-1]), dtype=torch.int64), 0
        for width, rows in widths.items():
            last = ends[rows, None] - 1
            first = last + 1 - torch.tensor([lengths[row] for row in rows])[:, None]
            tokens = first + torch.arange(width)
            own = tokens <= last
            back[tokens[own]] = before + own.flatten().nonzero()[:, 0]
            before += own.numel()
            taken.append(torch.minimum(tokens, last).to(device))
        return PaddedGroups(taken, back.to(device))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d], each token seeing its row up to itself."""
        found = []
        for taken in self.taken:
            rows = (t.index_select(0, taken.flatten()).unflatten(0, taken.shape) for t in (query, key, value))
            q, k, v = (row.transpose(1, 2) for row in rows)
            found.append(softmax_attention(q, k, v, scale=scale, is_causal=True).transpose(1, 2).flatten(0, 1))
        return torch.cat(found).index_select(0, self.back)


def attention_dtype(query: Tensor) -> torch.dtype:
    """What attention is computed in."""
    return torch.float64 if query.device.type == "cpu" and query.dtype == torch.float32 else query.dtype


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Tensor:
    """[B, H, M, d] of torch's `scaled_dot_product_attention`; key and value [B, K, L, d], where K divides H.

    Of float32 on a CPU it is computed in float64 and rounded once. Kernels that read one query and many add in
    different orders, of which float32 and the layers that follow make 1e-5; so sampling and replay have the same bits.
    The gradient is that of float32.
    """
    wide = attention_dtype(query)
    if query.device.type != "cpu":
        key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, **asked)
    if wide == query.dtype:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **asked)
    with torch.no_grad():
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        rounded = scaled_dot_product_attention(q, k, v, enable_gqa=True, **asked).to(query.dtype)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))):
        return rounded
    narrow = scaled_dot_product_attention(query, key, value, enable_gqa=True, **asked)
    said: Tensor = _WithGradientOf.apply(rounded, narrow)
    return said


class _WithGradientOf(torch.autograd.Function):
    """The first tensor, differentiated as if it were the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiated: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


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
    """Keys or values [N, K, ...] as [N, H, ...]: a key head serves adjacent query heads."""
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
    attention_fn: AttentionFn,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call: [1, N, H, d] from query [1, H, N, d], key and value [1, K, N, d]."""
    if sliding_window is not None:
        raise ValueError(f"{type(module).__name__} sees {sliding_window} tokens back; only full attention is written")
    layer: Any = module.layer_idx
    # Under autocast, normed queries and keys are wider than values; attention computes in the narrow type.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attention_fn(layer, q, k, v, scaling)[None], None


@cache
def register_attention() -> None:
    """Make the function known to transformers as `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
