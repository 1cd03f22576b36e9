"""Packs rows of tokens end to end, so that one forward reads them without padding between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.chunks import round_up
from unirl.models.language.attention import AttentionFn
from unirl.models.language.policy import OutputFn, TokenInputs
from unirl.types.conditions import Conditions, ImagePatches, PromptTokens
from unirl.types.segments import TextSegment


@dataclass(frozen=True)
class PackedTokens:
    """Rows end to end, and the images whose placeholders are among their tokens."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [N, 3]
    lengths: list[int]
    images: ImagePatches | None

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
        )

    def inputs(self, attention_fn: AttentionFn, output_fn: OutputFn) -> TokenInputs:
        """The input of a forward over these rows."""
        return TokenInputs(
            tokens=self.tokens,
            positions=self.positions,
            attention_fn=attention_fn,
            output_fn=output_fn,
            images=self.images,
        )


def prompts_of(conditions: Conditions) -> PromptTokens:
    """The tokens of the prompts."""
    prompts = conditions["prompt"]
    assert isinstance(prompts, PromptTokens)
    return prompts


def images_of(conditions: Conditions) -> ImagePatches | None:
    """The images of the prompts. None if there are only texts."""
    images = conditions.get("images")
    assert images is None or isinstance(images, ImagePatches)
    return images


def first_row_with_same_prompt(conditions: Conditions) -> list[int]:
    """Per row, the first of the adjacent rows with the same prompt. The samples of a group are adjacent."""
    prompts, images = prompts_of(conditions), images_of(conditions)
    tokens = prompts.tokens.split(prompts.lengths.tolist())
    patches = None if images is None else images.patches.split(images.offsets.diff().tolist())
    first = [0] * len(tokens)
    for row in range(1, len(tokens)):
        same = torch.equal(tokens[row], tokens[row - 1])
        if same and images is not None and patches is not None:
            same = images.grids[row] == images.grids[row - 1] and torch.equal(patches[row], patches[row - 1])
        first[row] = first[row - 1] if same else row
    return first


def pack_prompts(conditions: Conditions, rows: Sequence[int]) -> PackedTokens:
    """The prompts of `rows`."""
    prompts, images = prompts_of(conditions).select(rows), images_of(conditions)
    selected = None if images is None else images.select(rows)
    return PackedTokens(prompts.tokens, prompts.positions, prompts.lengths.tolist(), selected)


def pack_responses(conditions: Conditions, segment: TextSegment) -> tuple[PackedTokens, Tensor]:
    """Prompts with their responses, and the index [sum L] of the token before each token of `segment`.

    The last token of a response is left out, since no later token depends on it.
    """
    prompts = prompts_of(conditions)
    device = prompts.tokens.device
    prompt_lengths, lengths = prompts.lengths, segment.lengths
    read_lengths = prompt_lengths + (lengths - 1).clamp(min=0)
    starts = read_lengths.cumsum(0) - read_lengths
    parts, previous = [], []
    for row in range(len(prompts)):
        begin, end = int(prompts.offsets[row]), int(prompts.offsets[row + 1])
        first = len(prompts.tokens) + int(segment.offsets[row])
        count, length = int(read_lengths[row]) - (end - begin), int(lengths[row])
        parts += [torch.arange(begin, end), torch.arange(first, first + count)]
        last = int(starts[row]) + end - begin - 1
        previous.append(torch.arange(last, last + length))
    index = torch.cat(parts).to(device)
    tokens = torch.cat([prompts.tokens, segment.tokens.to(device)])[index]
    positions = torch.cat([prompts.positions, response_positions(prompts, lengths)])[index]
    return PackedTokens(tokens, positions, read_lengths.tolist(), images_of(conditions)), torch.cat(previous).to(device)


def response_positions(prompts: PromptTokens, lengths: Tensor) -> Tensor:
    """Positions [sum L] or [sum L, 3] of responses of `lengths` [B], continuing after their prompts."""
    offset = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    device = prompts.tokens.device
    starts = prompts.next_position.to(device)[torch.arange(len(lengths)).repeat_interleave(lengths).to(device)]
    return expand_positions(starts + offset.to(device), prompts.positions)


def expand_positions(positions: Tensor, others: Tensor) -> Tensor:
    """`positions` [N], or [N, 3] with equal components if `others` have three components."""
    return positions if others.dim() == 1 else positions[:, None].expand(-1, others.shape[1])
