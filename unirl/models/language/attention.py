"""Attention among the tokens of one forward: an object per forward, passed to every layer in place of a mask.

    PackedAttention     [a0 a1 a2 | b0 b1 | c0 ...]    rows end to end; each row is causal and sees no other row
    PrefillAttention    the same, and writes the rows' keys and values into a cache
    DecodeAttention     [a3 | b2 | c7]                 one token per slot; each sees the cached tokens of its slot

transformers calls `attention`, which is registered here under the name `ATTENTION`, in place of its own functions. The
decoder passes it the keyword `attention_fn`.
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
"""The name under which the attention function is registered with transformers."""
CPU = torch.device("cpu")
ROW_PAD_MULTIPLE = 16
"""Rows whose lengths round up to the same multiple of this are computed side by side."""
BLOCK = 64
"""Cached tokens are read in multiples of this, so that a row's bits depend on its own length alone."""


class AttentionFn(Protocol):
    """Computes the attention of one forward. Every layer calls it."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d] from query [N, H, d], key and value [N, K, d] of N tokens; K key heads divide H query heads."""
        ...


class PackedAttention:
    """Rows end to end: a token sees the earlier tokens of its own row, and itself."""

    def __init__(self, lengths: Sequence[int], device: torch.device = CPU) -> None:
        lengths = [length for length in lengths if length]
        # Everything is computed here, before the layers run, because their compiled forms only read it.
        self.longest = max(lengths)
        self.bounds = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
        self.groups = PaddedGroups.of(lengths, device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if has_varlen(query):
            return varlen_attention(query, key, value, self.bounds, self.longest, scale)
        return self.groups(query, key, value, scale)


@dataclass(frozen=True)
class PaddedGroups:
    """Rows of similar length side by side, padded at their ends. No real token sees the padding."""

    token_index: list[Tensor]  # one [B, W] per group: the packed token at each place
    place_of_token: Tensor  # [N] the place of each packed token in the groups laid end to end

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> PaddedGroups:
        """The groups of rows of `lengths` that lie end to end."""
        widths: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            widths.setdefault(round_up(length, ROW_PAD_MULTIPLE), []).append(row)
        ends = torch.tensor(lengths).cumsum(0)
        token_index, place_of_token, num_places = [], torch.empty(int(ends[-1]), dtype=torch.int64), 0
        for width, rows in widths.items():
            last = ends[rows, None] - 1
            first = last + 1 - torch.tensor([lengths[row] for row in rows])[:, None]
            tokens = first + torch.arange(width)
            is_real = tokens <= last
            place_of_token[tokens[is_real]] = num_places + is_real.flatten().nonzero()[:, 0]
            num_places += is_real.numel()
            token_index.append(torch.minimum(tokens, last).to(device))
        return PaddedGroups(token_index, place_of_token.to(device))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d] causal attention within each row."""
        outputs = []
        for index in self.token_index:
            rows = (t.index_select(0, index.flatten()).unflatten(0, index.shape) for t in (query, key, value))
            q, k, v = (row.transpose(1, 2) for row in rows)
            outputs.append(softmax_attention(q, k, v, scale=scale, is_causal=True).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.place_of_token)


# --- decoding with a cache -------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of the rows in the slots: [S, C, K, d] per layer, allocated when a layer first writes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, tokens: int) -> None:
        """Grow the capacity to at least `tokens` per slot."""
        if tokens <= self.capacity:
            return
        capacity = round_up(max(tokens, self.capacity * 3 // 2), BLOCK)
        for layer, (keys, values) in self.layers.items():  # one at a time: only one layer is in memory twice
            self.layers[layer] = (_grown(keys, capacity), _grown(values, capacity))
        self.capacity = capacity

    def select(self, slots: Sequence[int]) -> None:
        """Keep only `slots`, in this order."""
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (keys[list(slots)], values[list(slots)])
        self.slots = len(slots)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [N, K, d] at places [N] of slots laid end to end; returns the layer's whole tensors."""
        if layer not in self.layers:
            shape = (self.slots, self.capacity, *key.shape[1:])
            dtype = attention_dtype(key)  # cast once here, not in every step
            self.layers[layer] = (key.new_zeros(shape, dtype=dtype), value.new_zeros(shape, dtype=dtype))
        keys, values = self.layers[layer]
        keys.flatten(0, 1).index_copy_(0, places, key.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, places, value.to(values.dtype))
        return keys, values


def _grown(tensor: Tensor, capacity: int) -> Tensor:
    grown = tensor.new_zeros((tensor.shape[0], capacity, *tensor.shape[2:]))
    grown[:, : tensor.shape[1]] = tensor
    return grown


class PrefillAttention:
    """Attention among packed prompts, whose keys and values are written to `places` of the cache."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], sources: Tensor, places: Tensor) -> None:
        self.cache = cache
        self.rows = PackedAttention(lengths, places.device)
        self.sources = sources  # [M] tokens of the forward
        self.places = places  # [M] places of slots laid end to end

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.places, key[self.sources], value[self.sources])
        return self.rows(layer, query, key, value, scale)


class DecodeAttention:
    """Attention of one new token per slot to the cached tokens of its slot, itself included."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], device: torch.device) -> None:
        """
        Args:
            lengths: number of tokens per slot, including the new one.
        """
        self.cache = cache
        self.lengths = torch.tensor(lengths, device=device)
        self.places = torch.arange(len(lengths), device=device) * cache.capacity + self.lengths - 1
        # On an accelerator, one kernel for all slots matters more than bits that do not depend on other rows.
        self.groups = _by_blocks(lengths if device.type == "cpu" else [max(lengths)] * len(lengths))
        # Computed once for all layers: which of a group's keys each of its slots sees.
        self.masks = {
            width: (torch.arange(width, device=device) < self.lengths[slots][:, None])[:, None, None]
            for width, slots in self.groups.items()
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.write(layer, self.places, key, value)
        if len(self.groups) == 1:
            [width] = self.groups
            return self._padded(query, keys[:, :width], values[:, :width], self.masks[width], scale)
        out = torch.empty_like(query)
        for width, slots in self.groups.items():
            mask = self.masks[width]
            out[slots] = self._padded(query[slots], keys[slots, :width], values[slots, :width], mask, scale)
        return out

    def _padded(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        """[S, H, d]. The query heads of one key head become its queries, so that keys are not copied for them."""
        q = query.unflatten(1, (keys.shape[2], -1))
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        out = softmax_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.flatten(1, 2)


def _by_blocks(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Slots grouped by their length, rounded up to a multiple of BLOCK."""
    groups: dict[int, list[int]] = {}
    for slot, length in enumerate(lengths):
        groups.setdefault(round_up(length, BLOCK), []).append(slot)
    return groups


# --- kernels ---------------------------------------------------------------------------------------------------------


def attention_dtype(query: Tensor) -> torch.dtype:
    """The dtype in which attention is computed: float64 for float32 on a CPU."""
    return torch.float64 if query.device.type == "cpu" and query.dtype == torch.float32 else query.dtype


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """[B, H, M, d] by torch's `scaled_dot_product_attention`; key and value [B, K, L, d], where K divides H.

    For float32 on a CPU it is computed in float64 and rounded once. Kernels for one query and for many queries add in
    different orders; in float32, with the layers that follow, this makes a difference of 1e-5. With float64, sampling
    and replay have the same bits. The gradient is that of float32.
    """
    compute_dtype = attention_dtype(query)
    if query.device.type != "cpu":
        key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, **options)
    if compute_dtype == query.dtype:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    with torch.no_grad():
        q, k, v = query.to(compute_dtype), key.to(compute_dtype), value.to(compute_dtype)
        rounded = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).to(query.dtype)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))):
        return rounded
    differentiable = scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    output: Tensor = _WithGradientOf.apply(rounded, differentiable)
    return output


class _WithGradientOf(torch.autograd.Function):
    """Returns the first tensor, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiable: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def has_varlen(query: Tensor) -> bool:
    """True if torch's variable-length kernel can run on `query` [N, H, d]."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return (
        query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """[N, H, d] causal attention within rows that begin and end at `bounds` [B + 1] int32, by one CUDA kernel."""
    from torch.nn.attention.varlen import varlen_attn

    key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values [N, K, ...] repeated to [N, H, ...]: one key head serves adjacent query heads."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


# --- transformers ----------------------------------------------------------------------------------------------------


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
    """The function that transformers' layers call: [1, N, H, d] from query [1, H, N, d], key and value [1, K, N, d]."""
    if sliding_window is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens; only full attention is supported"
        )
    layer: Any = module.layer_idx
    # Under autocast, normed queries and keys have a wider dtype than values; attention computes in the narrow one.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attention_fn(layer, q, k, v, scaling)[None], None


@cache
def register_attention() -> None:
    """Register `attention` with transformers under the name `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
