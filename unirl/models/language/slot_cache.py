"""Keys and values of rows that are written token by token, and what the tokens of one forward see of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import PackedAttention, attention_dtype, softmax_attention

BLOCK = 64
"""Cached tokens are read in multiples of this: a row's bits depend on its own length alone."""


class KVCache:
    """Keys and values of the rows in the slots: [S, C, K, d] per layer, made when a layer first writes."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, tokens: int) -> None:
        """Room for rows of `tokens`."""
        if tokens <= self.capacity:
            return
        capacity = round_up(max(tokens, self.capacity * 3 // 2), BLOCK)
        for layer, (keys, values) in self.layers.items():  # one after another: twice the memory of a layer, not of all
            self.layers[layer] = (_wider(keys, capacity), _wider(values, capacity))
        self.capacity = capacity

    def keep(self, slots: Sequence[int]) -> None:
        """Give up all but `slots`."""
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (keys[list(slots)], values[list(slots)])
        self.slots = len(slots)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's tensors, now holding key and value [N, K, d] at places [N] of slots laid end to end."""
        if layer not in self.layers:
            shape = (self.slots, self.capacity, *key.shape[1:])
            wide = attention_dtype(key)  # once, and not in every step
            self.layers[layer] = (key.new_zeros(shape, dtype=wide), value.new_zeros(shape, dtype=wide))
        keys, values = self.layers[layer]
        keys.flatten(0, 1).index_copy_(0, places, key.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, places, value.to(values.dtype))
        return keys, values


def _wider(tensor: Tensor, capacity: int) -> Tensor:
    wider = tensor.new_zeros((tensor.shape[0], capacity, *tensor.shape[2:]))
    wider[:, : tensor.shape[1]] = tensor
    return wider


class Prefill:
    """Prompts end to end, which see as packed rows do; their keys and values go where `places` says."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], sources: Tensor, places: Tensor) -> None:
        self.cache = cache
        self.rows = PackedAttention(lengths, places.device)
        self.sources = sources  # [M] tokens of the forward
        self.places = places  # [M] of slots laid end to end

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.places, key[self.sources], value[self.sources])
        return self.rows(layer, query, key, value, scale)


class Step:
    """One token per slot, which sees what its slot holds, itself included."""

    def __init__(self, cache: KVCache, lengths: Sequence[int], device: torch.device) -> None:
        """
        Args:
            lengths: tokens per slot, this one included.
        """
        self.cache = cache
        self.lengths = torch.tensor(lengths, device=device)
        self.places = torch.arange(len(lengths), device=device) * cache.capacity + self.lengths - 1
        # On an accelerator one kernel for all is worth more than bits that do not depend on neighbours.
        self.groups = _by_blocks(lengths if device.type == "cpu" else [max(lengths)] * len(lengths))
        # Once for all layers: which of a group's keys each of its slots sees.
        self.seen = {
            width: (torch.arange(width, device=device) < self.lengths[slots][:, None])[:, None, None]
            for width, slots in self.groups.items()
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.write(layer, self.places, key, value)
        if len(self.groups) == 1:
            [width] = self.groups
            return self._padded(query, keys[:, :width], values[:, :width], self.seen[width], scale)
        out = torch.empty_like(query)
        for width, slots in self.groups.items():
            seen = self.seen[width]
            out[slots] = self._padded(query[slots], keys[slots, :width], values[slots, :width], seen, scale)
        return out

    def _padded(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        """[S, H, d]: the query heads of one key head are its queries, so keys are not copied for them."""
        q = query.unflatten(1, (keys.shape[2], -1))
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        out = softmax_attention(q, k, v, attn_mask=seen, scale=scale)
        return out.flatten(1, 2)


def _by_blocks(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Slots by their length, rounded up."""
    groups: dict[int, list[int]] = {}
    for slot, length in enumerate(lengths):
        groups.setdefault(round_up(length, BLOCK), []).append(slot)
    return groups
