"""Attention among the tokens of one forward: an object per forward, passed to every layer in place of a mask.

    PackedAttention     [a0 a1 a2 | b0 b1 | c0 ...]    rows end to end; each row is causal and sees no other row, and
                                                       the tokens of an image see each other
    PrefillAttention    the same, and writes the rows' keys and values into a cache
    DecodeAttention     [a3 | b2 | c7]                 one token per slot; each sees the cached tokens of its slot

transformers calls `attention`, which is registered here under the name `ATTENTION`, in place of its own functions. The
decoder passes it the keyword `attention_fn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad, scaled_dot_product_attention

from unirl.models.chunks import round_up
from unirl.types.batch import bounds_of
from unirl.types.conditions import Span
from unirl.types.device import CPU, capability, to_device
from unirl.types.rows import rows_by_key

ATTENTION = "unirl"
"""The name under which the attention function is registered with transformers."""
ROW_PAD_MULTIPLE = 16
"""Rows whose lengths round up to the same multiple of this are computed side by side."""
BLOCK = 64
"""Cached tokens are read in multiples of this, so that a row's bits depend on its own length alone."""


class AttentionLayer(Protocol):
    """An attention module of transformers. It holds its own part of a cache while responses are sampled."""

    kv_cache: tuple[Tensor, Tensor]
    """Keys and values [S, C, K, d] of the slots. Only a `KVCache` sets and deletes it."""


class AttentionFn(Protocol):
    """Computes the attention of one forward. Every layer calls it."""

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[N, H, d] from query [N, H, d], key and value [N, K, d] of N tokens; K key heads divide H query heads."""


class PackedAttention:
    """Rows end to end: a token sees the earlier tokens of its own row, itself, and the other tokens of its span.

    Rows of similar length are computed side by side, padded at their ends. No real token sees the padding.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device = CPU, spans: Sequence[Sequence[Span]] | None = None
    ) -> None:
        """
        Args:
            spans: for each row, the ranges of its tokens that see each other. None if there are none.
        """
        # Everything is computed here, before the layers run, because their compiled forms only read it.
        ranges = [own for own, length in zip(spans or [()] * len(lengths), lengths, strict=True) if length]
        lengths = [length for length in lengths if length]
        self.longest = max(lengths)
        self.bounds = to_device(bounds_of(lengths).int(), device)
        self.is_causal = not any(ranges)
        self.groups: list[tuple[Tensor, Tensor | None]] = []
        """For each group of rows, the packed token at each place [B, W], and which places each one sees [B, 1, W, W].
        The latter is None for rows without spans."""
        starts, place_of_token, num_places = bounds_of(lengths), torch.empty(sum(lengths), dtype=torch.int64), 0
        keys = ((round_up(n, ROW_PAD_MULTIPLE), bool(own)) for n, own in zip(lengths, ranges, strict=True))
        for (width, has_spans), rows in rows_by_key(keys).items():
            last = starts[1:][rows, None] - 1
            tokens = starts[rows, None] + torch.arange(width)
            is_real = tokens <= last
            place_of_token[tokens[is_real]] = num_places + is_real.flatten().nonzero()[:, 0]
            num_places += is_real.numel()
            mask = to_device(mask_of_spans(width, [ranges[row] for row in rows]), device) if has_spans else None
            self.groups.append((to_device(torch.minimum(tokens, last), device), mask))
        self.place_of_token = to_device(place_of_token, device)  # [N] in the groups laid end to end

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.is_causal and has_varlen(query):
            return varlen_attention(query, key, value, self.bounds, self.longest, scale)
        outputs = []
        for index, mask in self.groups:
            rows = (t.index_select(0, index.flatten()).unflatten(0, index.shape) for t in (query, key, value))
            q, k, v = (row.transpose(1, 2) for row in rows)
            attended = softmax_attention(q, k, v, scale, mask, is_causal=mask is None)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.place_of_token)


def mask_of_spans(width: int, spans: Sequence[Sequence[Span]]) -> Tensor:
    """[B, 1, W, W] True where the token of a line sees the token of a column, for rows with these spans."""
    mask = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(spans), 1, 1)
    for row, ranges in zip(mask, spans, strict=True):
        for start, stop in ranges:
            row[start:stop, start:stop] = True
    return mask[:, None]


# --- decoding with a cache -------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of the rows in the slots: [S, C, K, d] per layer, allocated when a layer first writes.

    They are attributes of the layers. A compiled block then reads them as it reads its weights, and one compiled form
    serves all layers; a lookup by the index of the layer would give every layer a compiled form of its own.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.layers: dict[AttentionLayer, None] = {}

    def reserve(self, tokens: int) -> None:
        """Grow the capacity to at least `tokens` per slot."""
        if tokens <= self.capacity:
            return
        capacity = round_up(max(tokens, self.capacity * 3 // 2), BLOCK)
        missing = (0, 0, 0, 0, 0, capacity - self.capacity)
        for layer in self.layers:  # one at a time: only one layer is in memory twice
            keys, values = layer.kv_cache
            layer.kv_cache = pad(keys, missing), pad(values, missing)
        self.capacity = capacity

    def select(self, slots: Tensor) -> None:
        """Keep only `slots`, in this order."""
        for layer in self.layers:
            keys, values = layer.kv_cache
            layer.kv_cache = keys[slots], values[slots]
        self.slots = len(slots)

    def allocate(self, layer: AttentionLayer, key: Tensor, value: Tensor) -> None:
        """Give `layer` room for keys and values like `key` and `value` [N, K, d], unless it has it."""
        if layer not in self.layers:
            shape = (self.slots, self.capacity, *key.shape[1:])
            dtype = attention_dtype(key)  # cast once when written, not in every step
            layer.kv_cache = key.new_zeros(shape, dtype=dtype), value.new_zeros(shape, dtype=dtype)
            self.layers[layer] = None

    def release(self) -> None:
        """Free the memory."""
        for layer in self.layers:
            del layer.kv_cache
        self.layers.clear()


def write_to_cache(layer: AttentionLayer, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Write key and value [N, K, d] at places [N] of slots laid end to end; returns the layer's whole tensors."""
    keys, values = layer.kv_cache
    keys.flatten(0, 1).index_copy_(0, places, key.to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, places, value.to(values.dtype))
    return keys, values


class PrefillAttention:
    """Attention among packed prompts, whose keys and values are written to `places` of the cache."""

    def __init__(
        self, cache: KVCache, rows: PackedAttention, sources: Tensor, places: Tensor, allocates: bool = True
    ) -> None:
        self.cache = cache
        self.rows = rows
        self.sources = sources  # [M] tokens of the forward
        self.places = places  # [M] places of slots laid end to end
        self.allocates = allocates
        """True in the first forward with a cache."""

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.allocates:
            self.cache.allocate(layer, key, value)
        write_to_cache(layer, self.places, key[self.sources], value[self.sources])
        return self.rows(layer, query, key, value, scale)


class DecodeAttention:
    """Attention of one new token per slot to the cached tokens of its slot, itself included."""

    def __init__(self, capacity: int, lengths: Tensor, groups: Mapping[int, Sequence[int] | None]) -> None:
        """
        Args:
            capacity: the capacity of the cache per slot.
            lengths: [S] number of cached tokens per slot, without the new one.
            groups: the slots that read together, by the number of places that they read, which is at least the number
                of their tokens. None stands for all slots.
        """
        slots, device = len(lengths), lengths.device
        self.places = torch.arange(0, slots * capacity, capacity, device=device) + lengths.clamp(max=capacity - 1)
        # Computed once for all layers: which of a group's keys each of its slots sees.
        self.groups = [
            (
                members,
                width,
                (torch.arange(width, device=device) <= (lengths if members is None else lengths[members])[:, None])[
                    :, None, None
                ],
            )
            for width, members in groups.items()
        ]

    def __call__(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = write_to_cache(layer, self.places, key, value)
        if len(self.groups) == 1:
            [(_, width, mask)] = self.groups
            return self._padded(query, keys[:, :width], values[:, :width], mask, scale)
        out = torch.empty_like(query)
        for slots, width, mask in self.groups:
            out[slots] = self._padded(query[slots], keys[slots, :width], values[slots, :width], mask, scale)
        return out

    def _padded(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        """[S, H, d]. The query heads of one key head become its queries, so that keys are not copied for them."""
        q = query.unflatten(1, (keys.shape[2], -1))
        return softmax_attention(q, keys.transpose(1, 2), values.transpose(1, 2), scale, mask).flatten(1, 2)


def groups_by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Groups of slots in which the bits of a slot depend on the number of its own tokens alone, for CPUs."""
    return rows_by_key(round_up(length, BLOCK) for length in lengths)


def width_of_all(length: int, capacity: int) -> int:
    """The places that all slots read on an accelerator, where one kernel matters more than such bits.

    There are four widths for each doubling of the length, so a run has few of them, and each can be compiled or
    captured once. A slot reads at most a quarter more than the longest one needs, or than a block.
    """
    return min(round_up(length, max(BLOCK, (1 << (length - 1).bit_length()) // 8)), capacity)


# --- kernels ---------------------------------------------------------------------------------------------------------


def attention_dtype(query: Tensor) -> torch.dtype:
    """The dtype in which attention is computed: float64 for float32 on a CPU."""
    return torch.float64 if query.device.type == "cpu" and query.dtype == torch.float32 else query.dtype


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """[B, H, M, d] by torch's `scaled_dot_product_attention`; key and value [B, K, L, d], where K divides H.

    For float32 on a CPU it is computed in float64 and rounded once. Kernels for one query and for many queries add in
    different orders; in float32, with the layers that follow, this makes a difference of 1e-5. With float64, sampling
    and replay have the same bits. The gradient is that of float32.
    """
    on_cpu, compute_dtype = query.device.type == "cpu", attention_dtype(query)
    attend = partial(scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=on_cpu)
    if not on_cpu:
        key, value = (_for_each_query_head(tensor, query) for tensor in (key, value))
    if compute_dtype == query.dtype:
        return attend(query, key, value)
    with torch.no_grad():
        rounded = attend(*(tensor.to(compute_dtype) for tensor in (query, key, value))).to(query.dtype)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))):
        return rounded
    return _WithGradientOf.apply(rounded, attend(query, key, value))


class _WithGradientOf(torch.autograd.Function):
    """Returns the first tensor, with the gradient of the second."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, differentiable: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def has_varlen(query: Tensor) -> bool:
    """True if torch's variable-length kernel can run on `query` [N, H, d]."""
    version = capability(query.device)
    if version is None or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and version >= (8, 0)


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
    module: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_fn: AttentionFn,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """The function that transformers' layers call: [1, N, H, d] from query [1, H, N, d], key and value [1, K, N, d]."""
    if sliding_window is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens; only full attention is supported"
        )
    # Under autocast, normed queries and keys have a wider dtype than values; attention computes in the narrow one.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attention_fn(module, q, k, v, scaling)[None], None


@cache
def register_attention() -> None:
    """Register `attention` with transformers under the name `ATTENTION`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
