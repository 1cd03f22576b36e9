"""Sizes of samples: which prompt is drawn at which, and which size is due next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unirl.data.datasets import Prompt
from unirl.data.images import Looks, look_at

Size = tuple[int, int]
"""(height, width) in pixels."""


def with_sizes(prompts: Iterable[Prompt], sizes: Sequence[Size], looks: Looks) -> tuple[Prompt, ...]:
    """The prompts, each with the size at which it is drawn; without sizes, as they are."""
    if not sizes:
        return tuple(prompts)
    return tuple(replace(prompt, size=size_of(prompt, sizes, looks)) for prompt in prompts)


def size_of(prompt: Prompt, sizes: Sequence[Size], looks: Looks) -> Size:
    """The size whose shape is nearest to that of the prompt's first picture; without a picture, one that its id picks.

    A picture is one that the prompt is about or, where there is none, the first of its recorded samples.
    """
    for ref in (*prompt.images, *prompt.recorded):
        look = looks[ref.uri] if ref.uri in looks else look_at(ref.uri)
        return nearest_size(look.height, look.width, sizes)
    key = hashlib.blake2b(f"size:{prompt.prompt_id}".encode(), digest_size=8).digest()
    return sizes[int.from_bytes(key) % len(sizes)]


def nearest_size(height: int, width: int, sizes: Sequence[Size]) -> Size:
    """The size of the nearest aspect, by the logarithm; of those that are equally near, the one of the nearest area."""

    def distance(size: Size) -> tuple[float, float]:
        aspect = math.log(size[0] / size[1]) - math.log(height / width)
        return round(abs(aspect), 9), abs(math.log(size[0] * size[1]) - math.log(height * width))

    return min(sizes, key=distance)


def by_size(prompts: Iterable[Prompt]) -> list[list[Prompt]]:
    """The prompts of each size, in their order; the sizes in one order, whatever that of the prompts is."""
    prompts = list(prompts)
    return [[prompt for prompt in prompts if prompt.size == size] for size in sizes_of(prompts)]


def sizes_of(prompts: Iterable[Prompt]) -> list[Size | None]:
    """The sizes of prompts, sorted."""
    return sorted({prompt.size for prompt in prompts}, key=lambda size: size or (0, 0))


def next_due(drawn: Sequence[int], held: Sequence[int], count: int, key: str | None) -> int:
    """Which list is due when `count` prompts are drawn next: the one whose draws, by its length, end first.

    A list is never more than `count` draws ahead of its share, or behind it.

    Args:
        drawn: draws that were made of each list.
        held: prompts of each list, at least one.
        key: makes the order irregular, in [0, count) draws; None = regular.
    """

    def time(number: int) -> float:
        start = 1.0 if key is None else _unit(f"{key}:{number}:{drawn[number]}")
        return (drawn[number] + start * count) / held[number]

    return min(range(len(drawn)), key=lambda number: (time(number), number))


def _unit(key: str) -> float:
    """A number in [0, 1) that is a hash of `key`."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest()) / 2**48
