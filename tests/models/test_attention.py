"""Who sees whom among packed tokens: against masks written out, and by whom a value does not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl.models.language import attention
from unirl.models.language.attention import (
    BLOCK,
    DecodeAttention,
    KVCache,
    PackedAttention,
    PrefillAttention,
    groups_by_length,
    width_of_all,
)

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def qkv(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    q, k, v = (torch.randn(count, h, WIDTH, generator=generator) for h in heads)
    return q, k, v


class Layer:
    """An attention module."""

    kv_cache: tuple[Tensor, Tensor]


LAYER = Layer()


def decoded(cache: KVCache, lengths: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A step of the only layer of `cache`. `lengths` are the numbers of tokens per slot, including the new one."""
    [layer] = cache.layers
    attention_fn = DecodeAttention(cache.capacity, torch.tensor(lengths) - 1, groups_by_length(lengths))
    return attention_fn(layer, query, key, value, SCALE)


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The definition: softmax over what is seen [N, M]; each key head serves adjacent query heads."""
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query.double(), key.double()) * SCALE
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, value.double())


def test_packed_rows_see_their_own_past_only() -> None:
    lengths = [5, 1, 70, 3]
    q, k, v = qkv(sum(lengths))
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (row[:, None] == row) & (torch.arange(len(row))[:, None] >= torch.arange(len(row)))
    assert torch.allclose(PackedAttention(lengths)(LAYER, q, k, v, SCALE).double(), masked(q, k, v, seen), atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    q, k, v = qkv(30)
    together = PackedAttention([7, 0, 20, 3])(LAYER, q, k, v, SCALE)
    alone = PackedAttention([20])(LAYER, q[7:27], k[7:27], v[7:27], SCALE)
    assert torch.equal(together[7:27], alone)


SPANS = [((1, 4),), (), ((0, 20), (33, 60)), ()]
"""Ranges of tokens that see each other, for rows of 5, 1, 70 and 6 tokens. Rows 0 and 3 have one padded length."""


def seen_with_spans(lengths: list[int]) -> Tensor:
    """The definition, pair by pair."""
    row = [number for number, length in enumerate(lengths) for _ in range(length)]
    place = [place for length in lengths for place in range(length)]

    def sees(i: int, j: int) -> bool:
        same_span = any(a <= place[i] < b and a <= place[j] < b for a, b in SPANS[row[i]])
        return row[i] == row[j] and (place[j] <= place[i] or same_span)

    return torch.tensor([[sees(i, j) for j in range(len(row))] for i in range(len(row))])


def test_tokens_of_a_span_see_each_other_and_all_else_stays_causal() -> None:
    lengths = [5, 1, 70, 6]
    inputs, seen = [tensor.requires_grad_() for tensor in qkv(sum(lengths))], seen_with_spans(lengths)
    result, wanted = PackedAttention(lengths, spans=SPANS)(LAYER, *inputs, SCALE), masked(*inputs, seen)
    assert torch.allclose(result.double(), wanted, atol=1e-6)
    assert not torch.allclose(result, PackedAttention(lengths)(LAYER, *inputs, SCALE), atol=1e-2)
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    both = (torch.autograd.grad((out * weights).sum(), inputs) for out in (result, wanted))
    for ours, theirs in zip(*both, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_row_has_the_same_bits_among_rows_with_spans() -> None:
    q, k, v = qkv(82)
    together = PackedAttention([5, 1, 70, 6], spans=SPANS)(LAYER, q, k, v, SCALE)
    for start, length, spans in ((6, 70, SPANS[2:3]), (76, 6, None)):
        own = slice(start, start + length)
        alone = PackedAttention([length], spans=spans)(LAYER, q[own], k[own], v[own], SCALE)
        assert torch.equal(together[own], alone)


def test_a_causal_kernel_never_runs_rows_with_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(82)
    attend = PackedAttention([5, 1, 70, 6], spans=SPANS)
    plain = attend(LAYER, q, k, v, SCALE)
    monkeypatch.setattr(attention, "has_varlen", lambda query: True)
    assert torch.equal(attend(LAYER, q, k, v, SCALE), plain)


def test_the_kernel_for_ragged_rows_is_told_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator one kernel runs all rows: here a stand-in that does what its documentation says."""
    import torch.nn.attention.varlen as ragged

    def varlen_attn(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):  # type: ignore[no-untyped-def]
        assert torch.equal(bounds_q, bounds_k) and bounds_q.dtype == torch.int32 and window_size == (-1, 0)
        assert q.shape == k.shape == v.shape and max_q == max_k == int(bounds_q.diff().max())
        row = torch.bucketize(torch.arange(len(q)), bounds_q[1:], right=True)
        seen = (row[:, None] == row) & (torch.arange(len(q))[:, None] >= torch.arange(len(q)))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    q, k, v = qkv(30)
    plain = PackedAttention([7, 0, 20, 3])(LAYER, q, k, v, SCALE)
    monkeypatch.setattr(ragged, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "has_varlen", lambda query: True)
    assert torch.allclose(PackedAttention([7, 0, 20, 3])(LAYER, q, k, v, SCALE), plain, atol=1e-6)


def steps(cache: KVCache, first: list[int], count: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """`count` steps of slots that hold `first` tokens: what each gave, and what it was fed."""
    result, fed = [], []
    for i in range(count):
        fed.append(qkv(len(first), seed=100 + i))
        lengths = [length + i + 1 for length in first]
        cache.reserve(max(lengths))
        result.append(decoded(cache, lengths, *fed[-1]))
    return result, fed


def filled_cache(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> KVCache:
    cache = KVCache(len(lengths))
    cache.reserve(max(lengths))
    places = torch.cat([torch.arange(n) + slot * cache.capacity for slot, n in enumerate(lengths)])
    PrefillAttention(cache, PackedAttention(lengths), torch.arange(len(q)), places)(Layer(), q, k, v, SCALE)
    return cache


def test_a_step_sees_the_prompt_and_all_earlier_steps_of_its_slot() -> None:
    lengths = [5, BLOCK - 1, 2, 2 * BLOCK + 3]  # one crosses into the next block, and the room grows on the way
    q, k, v = qkv(sum(lengths))
    result, fed = steps(filled_cache(lengths, q, k, v), lengths, 5)
    prompts = list(zip(k.split(lengths), v.split(lengths), strict=True))
    for i, out in enumerate(result):
        for slot, (keys, values) in enumerate(prompts):
            keys = torch.cat([keys, *(step[1][slot][None] for step in fed[: i + 1])])
            values = torch.cat([values, *(step[2][slot][None] for step in fed[: i + 1])])
            wanted = masked(fed[i][0][slot][None], keys, values, torch.ones(1, len(keys), dtype=torch.bool))
            assert torch.allclose(out[slot].double(), wanted[0], atol=1e-6)


def test_a_slot_has_the_same_bits_whoever_sits_beside_it() -> None:
    q, k, v = qkv(300)
    few = filled_cache([40, 10, 10, 10], q[:70], k[:70], v[:70])
    many = filled_cache([40, 200, 60], q[:300], k[:300], v[:300])
    for i in range(30):
        fed = qkv(4, seed=i)
        few.reserve(41 + i)
        a = decoded(few, [41 + i, 11 + i, 11 + i, 11 + i], *fed)
        many.reserve(201 + i)
        b = decoded(many, [41 + i, 201 + i, 61 + i], *(t[[0, 2, 3]] for t in fed))
        assert torch.equal(a[0], b[0])


def test_tokens_one_by_one_have_the_bits_of_their_rows_in_one_go() -> None:
    lengths = [70, 3, 200, 40]
    q, k, v = (3 * tensor for tensor in qkv(sum(lengths)))
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    cache = KVCache(len(lengths))
    cache.reserve(max(lengths))
    cache.allocate(Layer(), k, v)
    whole, result = PackedAttention(lengths)(LAYER, q, k, v, SCALE), torch.empty_like(q)
    for done in range(max(lengths)):
        tokens = starts + torch.tensor(lengths).sub(1).clamp(max=done)  # a row at its end says its last token again
        held = [min(done + 1, length) for length in lengths]
        result[tokens] = decoded(cache, held, q[tokens], k[tokens], v[tokens])
    assert torch.equal(result, whole)


def test_gradients_of_packed_rows_are_those_of_their_masks() -> None:
    lengths = [5, 1, 70, 3]
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (row[:, None] == row) & (torch.arange(len(row))[:, None] >= torch.arange(len(row)))
    inputs = [tensor.requires_grad_() for tensor in qkv(sum(lengths))]
    weights = torch.linspace(-1, 1, inputs[0].numel()).view_as(inputs[0])
    result = torch.autograd.grad((PackedAttention(lengths)(LAYER, *inputs, SCALE) * weights).sum(), inputs)
    wanted = torch.autograd.grad((masked(*inputs, seen) * weights).sum(), inputs)
    for ours, theirs in zip(result, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_slots_that_are_given_up_leave_the_others_as_they_were() -> None:
    lengths = [6, 9, 4]
    q, k, v = qkv(sum(lengths))
    whole, cut = filled_cache(lengths, q, k, v), filled_cache(lengths, q, k, v)
    cut.select(torch.tensor([0, 2]))
    fed = qkv(3, seed=9)
    all_slots = decoded(whole, [7, 10, 5], *fed)
    two_slots = decoded(cut, [7, 5], *(t[[0, 2]] for t in fed))
    assert torch.equal(all_slots[[0, 2]], two_slots)


def test_slots_that_read_the_same_width_give_the_same_result_to_rounding() -> None:
    """As on an accelerator."""
    lengths = [40, 200, 60]
    q, k, v = qkv(300)
    apart, together = filled_cache(lengths, q, k, v), filled_cache(lengths, q, k, v)
    for cache in (apart, together):
        cache.reserve(500)
    [layer], fed, held = together.layers, qkv(3, seed=9), torch.tensor(lengths)
    one = DecodeAttention(together.capacity, held, {width_of_all(201, together.capacity): None})(layer, *fed, SCALE)
    assert torch.allclose(one, decoded(apart, [41, 201, 61], *fed), atol=1e-6)


def test_the_widths_of_all_slots_are_few_and_little_more_than_needed() -> None:
    widths = [width_of_all(length, 8192) for length in range(1, 8193)]
    assert all(length <= width <= max(1.25 * length, length + BLOCK) for length, width in enumerate(widths, 1))
    assert len(set(widths)) < 28 and widths == sorted(widths) and width_of_all(700, 704) == 704
