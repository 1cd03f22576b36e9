"""Where prompts come from. Which prompt is drawn is a pure function of (seed, number of the draw)."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

from unirl.config.errors import ResumeError
from unirl.data.datasets import Prompt, load_prompts, with_recorded
from unirl.data.images import Looks, check_images, digest_of, look_at
from unirl.types.primitives import RecordedRole
from unirl.types.protocols import State

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


BUILT_IN = (
    "a red circle on a white table",
    "a watercolor landscape with snowy mountains at sunrise",
    "a robot reading a book under warm light",
    "two cats sleeping on a blue sofa",
    "a bowl of oranges beside a green bottle",
    "a lighthouse on a cliff during a storm",
    "a street market at night in the rain",
    "an astronaut riding a horse in a desert",
)


class Draws:
    """Endless draws from a list of prompts: every prompt once per epoch, in an order that only seed and epoch decide.

    Draw number c is prompt `order(epoch)[c mod n]` of epoch `c div n`, so a batch may span epochs; the epoch is part of
    a draw's group id, and nothing but a cursor has to be saved. The order sorts prompts by a keyed hash of their ids:
    it survives a reordered file and does not depend on any generator's implementation.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self.prompts = prompts
        self.shuffle, self.seed = shuffle, seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Draws number `cursor` to `cursor + count - 1`; changes nothing."""
        if cursor < 0 or count < 1:
            raise ValueError(f"cursor must be >= 0 and count >= 1, got cursor={cursor}, count={count}")
        return [self._draw(number) for number in range(cursor, cursor + count)]

    def _draw(self, number: int) -> Prompt:
        epoch, position = divmod(number, len(self.prompts))
        return self.prompts[self._order(epoch)[position]].in_epoch(epoch)

    def _make_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))

        def rank(index: int) -> bytes:
            key = f"{self.seed}::order{epoch}:{self.prompts[index].prompt_id}"
            return hashlib.blake2b(key.encode(), digest_size=16).digest()

        return sorted(range(len(self.prompts)), key=rank)


class PromptSource(ABC):
    """Endless draws from a list of prompts. Prompts of different sizes are never drawn together.

    The prompts of each size are a list of their own, and a size is drawn as often as its share of the prompts says:
    which one is due next is a function of seed and cursors, and these are the only state.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, looks: Looks | None = None) -> None:
        """
        Args:
            looks: what is known of the pictures; None = they are opened here.
        """
        self.prompts = tuple(prompts)
        self.shuffle, self.seed = shuffle, seed
        self.looks = check_images(self.prompts) if looks is None else looks
        self.draws = {some[0].size: Draws(some, shuffle=shuffle, seed=seed) for some in by_size(self.prompts)}
        self.cursors = dict.fromkeys(self.draws, 0)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int, size: Size | None = None) -> list[Prompt]:
        """Draws number `cursor` to `cursor + count - 1` of the prompts of one size; changes nothing."""
        return self.draws[size].take(cursor, count)

    def draw(self, count: int, size: Size | None = None) -> list[Prompt]:
        """The next `count` draws, all of one size; moves its cursor.

        Args:
            size: the size that is wanted; None = the one that is due.
        """
        if size is None:
            size = self._due(count)
        prompts = self.take(self.cursors[size], count, size)
        self.cursors[size] += count
        return prompts

    def _due(self, count: int) -> Size | None:
        sizes = list(self.draws)
        held = [len(draws) for draws in self.draws.values()]
        key = f"{self.seed}::due" if self.shuffle else None
        return sizes[next_due(list(self.cursors.values()), held, count, key)]

    def sized(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Other prompts, each with the size that this source would draw it at."""
        return list(prompts)

    @abstractmethod
    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        """Held-out prompts in the order of their file, the first `max_prompts` of them (None: all)."""

    def state_dict(self) -> State:
        return {
            "cursors": list(self.cursors.values()),
            "prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: State) -> None:
        """Raises CheckpointError (7002) when the prompts are not those that the checkpoint was made with."""
        if state["fingerprint"] != self.fingerprint:
            raise ResumeError(
                f"the data changed since the checkpoint: {len(self.prompts)} prompts now, {state['prompts']} then, or "
                "their texts, pictures or sizes differ, so the order of draws would be another. Restore the data file, "
                "or start a new run"
            )
        self.cursors = dict(zip(self.draws, map(int, state["cursors"]), strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the draws, the contents of pictures included, and not where files lie.

        Shuffled prompts may stand in the file in any order.
        """
        digest = hashlib.blake2b(f"{self.shuffle}:{self.seed if self.shuffle else ''}".encode(), digest_size=16)
        for prompt in sorted(self.prompts, key=lambda prompt: prompt.prompt_id) if self.shuffle else self.prompts:
            media = tuple((ref.modality, ref.role, self._digest(ref.uri)) for ref in prompt.media)
            digest.update(repr((prompt.prompt_id, prompt.text, prompt.metadata, media, prompt.size)).encode())
        return digest.hexdigest()

    def _digest(self, uri: str) -> str:
        return self.looks[uri].digest if uri in self.looks else digest_of(uri)


class MultimodalRLDataSource(PromptSource):
    """Prompts of a file (`readers.py`), and held-out ones of another for evaluation."""

    toy: ClassVar[Mapping[str, object]] = {"sizes": []}

    def __init__(
        self,
        seed: int = 42,
        eval_data_path: str | None = None,
        *,
        data_path: str,
        shuffle: bool = True,
        prompt_key: str = "prompt",
        recorded: tuple[RecordedRole, ...] = (),
        sizes: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """The trainer gives the run's seed, and the evaluation block's file (absent: the training file, unshuffled).

        Args:
            recorded: the samples of a prompt are its pictures of these roles, in this order; [] = samples are drawn.
            sizes: [height, width] in pixels that samples may have, the nearest to the prompt's picture in shape; [] =
                all have that of `sampling`.
        """
        prompts = with_recorded(load_prompts(Path(data_path), prompt_key=prompt_key), recorded)
        held_out = load_prompts(Path(eval_data_path), prompt_key=prompt_key) if eval_data_path else None
        looks = check_images((*prompts, *(held_out or ())))
        self.sizes = sizes
        super().__init__(with_sizes(prompts, sizes, looks), shuffle=shuffle, seed=seed, looks=looks)
        self.held_out = self.prompts if held_out is None else with_sizes(held_out, sizes, looks)

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        return list(self.held_out[:max_prompts])

    def sized(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        return list(with_sizes(prompts, self.sizes, self.looks))


class DefaultDataSource(PromptSource):
    """A few built-in prompts, for smoke checks: no file is needed."""

    def __init__(self, seed: int = 42, *, shuffle: bool = True) -> None:
        prompts = [Prompt(text=text, prompt_id=f"built-in:{index}") for index, text in enumerate(BUILT_IN)]
        super().__init__(prompts, shuffle=shuffle, seed=seed)

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        return list(self.prompts[:max_prompts])
