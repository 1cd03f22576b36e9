"""Packs rows of tokens end to end, so that one forward reads them without padding between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import AttentionFn, PackedAttention
from unirl.models.language.policy import OutputFn, TokenInputs
from unirl.types.batch import bounds_of
from unirl.types.conditions import Conditions, PromptImageInputs, PromptTokens, Span
from unirl.types.primitives import StartedResponses
from unirl.types.segments import TextSegment

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True)
class PackedTokens:
    """Rows end to end, and the images whose placeholders are among their tokens."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [N, n]
    lengths: list[int]
    images: PromptImageInputs | None
    spans: Sequence[Sequence[Span]] | None = None
    """For each row, the ranges of its tokens that see each other. None if there are none."""

    def padded(self, multiple: int) -> PackedTokens:
        """The same rows and one padding row, so that N is a multiple of `multiple`.

        On a CPU, the bits of a token then depend on its own row alone.
        """
        num_padding = round_up(len(self.tokens), multiple) - len(self.tokens)
        return PackedTokens(
            tokens=torch.cat([self.tokens, self.tokens.new_zeros(num_padding)]),
            positions=torch.cat([self.positions, self.positions.new_zeros(num_padding, *self.positions.shape[1:])]),
            lengths=[*self.lengths, num_padding],
            images=self.images,
            spans=None if self.spans is None else [*self.spans, ()],
        )

    def followed_by(self, other: PackedTokens) -> PackedTokens:
        """These rows, then those of `other`. Neither may have images."""
        assert self.images is None and other.images is None
        return PackedTokens(
            tokens=torch.cat([self.tokens, other.tokens]),
            positions=torch.cat([self.positions, other.positions]),
            lengths=[*self.lengths, *other.lengths],
            images=None,
        )

    def attention(self, device: torch.device) -> PackedAttention:
        """The attention among the tokens of each row."""
        return PackedAttention(self.lengths, device, self.spans)

    def inputs(self, attention_fn: AttentionFn, output_fn: OutputFn) -> TokenInputs:
        """The input of a forward over these rows."""
        return TokenInputs(self.tokens, self.positions, attention_fn, output_fn, self.images)


def prompts_of(conditions: Conditions) -> PromptTokens:
    """The tokens of the prompts."""
    prompts = conditions["prompt"]
    assert isinstance(prompts, PromptTokens)
    return prompts


def images_of(conditions: Conditions) -> PromptImageInputs | None:
    """The images of the prompts. None if there are only texts."""
    images = conditions.get("images")
    assert images is None or isinstance(images, PromptImageInputs)
    return images


def first_row_with_same_prompt(conditions: Conditions) -> list[int]:
    """Per row, the first of the adjacent rows with the same prompt. The samples of a group are adjacent."""
    prompts, images = prompts_of(conditions), images_of(conditions)
    lengths = prompts.lengths.tolist()
    keys: list[object] = lengths if images is None else list(zip(lengths, images.identities(), strict=True))
    similar = [row for row in range(1, len(keys)) if keys[row] == keys[row - 1]]
    tokens = prompts.tokens.split(lengths)
    same = set()
    if similar:  # the host waits for the device once
        flags = torch.stack([(tokens[row] == tokens[row - 1]).all() for row in similar]).tolist()
        same = {row for row, flag in zip(similar, flags, strict=True) if flag}
    first = list(range(len(keys)))
    for row in sorted(same):
        first[row] = first[row - 1]
    return first


def pack_prompts(conditions: Conditions, rows: Sequence[int]) -> PackedTokens:
    """The prompts of `rows`."""
    prompts, images = prompts_of(conditions).select(rows), images_of(conditions)
    selected = None if images is None else images.select(rows)
    return PackedTokens(prompts.tokens, prompts.positions, prompts.lengths.tolist(), selected, prompts.spans)


def pack_responses(conditions: Conditions, segment: TextSegment) -> tuple[PackedTokens, Int[Tensor, "sum_L"]]:
    """Prompts with their responses, and the index [sum L] of the token before each token of `segment`.

    The last token of a response is left out, since no later token depends on it.
    """
    prompts = prompts_of(conditions)
    prompt_lengths, device = prompts.lengths.tolist(), prompts.tokens.device
    rows = zip(
        prompts.tokens.split(prompt_lengths),
        prompts.positions.split(prompt_lengths),
        prompts.next_position.to(device),
        segment.tokens.to(device).split(segment.lengths.tolist()),
        strict=True,
    )
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    previous: list[Tensor] = []
    lengths: list[int] = []
    for prompt, places, next_position, response in rows:
        offsets = torch.arange(len(response), device=device)
        previous.append(sum(lengths) + len(prompt) - 1 + offsets)
        tokens += [prompt, response[:-1]]
        positions += [places, expand_positions(next_position + offsets[:-1], places)]
        lengths.append(len(prompt) + len(response[:-1]))
    packed = PackedTokens(torch.cat(tokens), torch.cat(positions), lengths, images_of(conditions), prompts.spans)
    return packed, torch.cat(previous)


def with_beginnings(conditions: Conditions, started: StartedResponses) -> Conditions:
    """Conditions whose prompts end with the tokens that responses have so far."""
    prompts = prompts_of(conditions)
    lengths, own = prompts.lengths.tolist(), started.offsets.diff()
    tokens, positions = [], []
    rows = zip(
        prompts.tokens.split(lengths),
        prompts.positions.split(lengths),
        prompts.next_position,
        started.tokens.to(prompts.tokens.device).split(own.tolist()),
        strict=True,
    )
    for prompt, places, next_position, beginning in rows:
        tokens += [prompt, beginning]
        offsets = torch.arange(len(beginning), device=prompt.device)
        positions += [places, expand_positions(next_position.to(prompt.device) + offsets, places)]
    longer = prompts.replace(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        next_position=prompts.next_position + own.to(prompts.next_position.device),
        offsets=prompts.offsets + started.offsets,
    )
    return {**conditions, "prompt": longer}


def prompt_tokens(
    rows: Sequence[Sequence[int]],
    positions: Sequence[Int[Tensor, "_ ..."]] | None = None,
    spans: Sequence[tuple[Span, ...]] | None = None,
) -> PromptTokens:
    """Prompts from the tokens of each row, with their positions [P] or [P, n]. None counts 0, 1, 2, ...

    Args:
        spans: the ranges of each row whose tokens see each other.
    """
    if positions is None:
        positions = [torch.arange(len(row)) for row in rows]
    return PromptTokens(
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        positions=torch.cat(list(positions)),
        next_position=torch.stack([places.max() + 1 if len(places) else torch.tensor(0) for places in positions]),
        offsets=bounds_of([len(row) for row in rows]),
        spans=None if spans is None else list(spans),
    )


def expand_positions(positions: Int[Tensor, "N"], others: Int[Tensor, "_ *components"]) -> Int[Tensor, "N *components"]:
    """`positions` [N], or [N, n] with equal components if `others` have n components."""
    return positions if others.dim() == 1 else positions[:, None].expand(-1, others.shape[1])
