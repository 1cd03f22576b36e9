"""Data sources: which prompts each step gets, and at which size.

The prompt at a position of the endless sequence is a pure function of seed and position, so a run resumes exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import ClassVar

from unirl.config.errors import ResumeError
from unirl.data.datasets import Prompt, load_prompts, with_recorded
from unirl.data.images import ImageInfos, check_images, check_remote, digest_of, read_image_info
from unirl.types.primitives import RecordedRole
from unirl.types.protocols import State

Size = tuple[int, int]
"""(height, width) in pixels."""


def size_of(prompt: Prompt, sizes: Sequence[Size], infos: ImageInfos) -> Size:
    """The size whose aspect ratio is nearest to the prompt's first image. A hash of the id decides without an image.

    The first condition image counts, otherwise the first recorded sample.
    """
    for ref in (*prompt.images, *prompt.recorded):
        info = infos[ref.uri] if ref.uri in infos else read_image_info(ref.uri)
        return nearest_size(info.height, info.width, sizes)
    key = hashlib.blake2b(f"size:{prompt.prompt_id}".encode(), digest_size=8).digest()
    return sizes[int.from_bytes(key) % len(sizes)]


def nearest_size(height: int, width: int, sizes: Sequence[Size]) -> Size:
    """The size with the nearest aspect ratio on a logarithmic scale; among equally near ones the nearest area."""

    def distance(size: Size) -> tuple[float, float]:
        aspect = math.log(size[0] / size[1]) - math.log(height / width)
        return round(abs(aspect), 9), abs(math.log(size[0] * size[1]) - math.log(height * width))

    return min(sizes, key=distance)


def by_size(prompts: Iterable[Prompt]) -> list[list[Prompt]]:
    """The prompts of each size, in their order. Sizes are sorted."""
    prompts = list(prompts)
    return [[prompt for prompt in prompts if prompt.size == size] for size in sizes_of(prompts)]


def sizes_of(prompts: Iterable[Prompt]) -> list[Size | None]:
    """The distinct sizes of prompts, sorted."""
    return sorted({prompt.size for prompt in prompts}, key=lambda size: size or (0, 0))


def next_due(cursors: Sequence[int], lengths: Sequence[int], count: int, key: str | None) -> int:
    """Index of the list that the next `count` prompts come from, so that each list is used in proportion to its length.

    A list is never more than `count` prompts ahead of its share or behind it.

    Args:
        cursors: prompts that were taken from each list so far.
        lengths: prompts of each list, at least one.
        key: makes the order irregular, by less than `count` prompts; None = regular.
    """

    def time(index: int) -> float:
        start = 1.0
        if key is not None:
            digest = hashlib.blake2b(f"{key}:{index}:{cursors[index]}".encode(), digest_size=6).digest()
            start = int.from_bytes(digest) / 2**48  # a number in [0, 1)
        return (cursors[index] + start * count) / lengths[index]

    return min(range(len(cursors)), key=lambda index: (time(index), index))


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


class PromptOrder:
    """An endless order of a list of prompts: each prompt once per epoch, in an order that only seed and epoch decide.

    Position c holds prompt `order(epoch)[c mod n]` of epoch `c div n`, so a batch may span epochs. The epoch is part of
    a prompt's group id, and only a cursor has to be saved. The order sorts prompts by a keyed hash of their ids, so it
    does not change when the file is reordered, and depends on no implementation of a random generator.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self.prompts = prompts
        self.shuffle, self.seed = shuffle, seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        return len(self.prompts)

    def prompts_at(self, cursor: int, count: int) -> list[Prompt]:
        """The prompts at positions `cursor` to `cursor + count - 1`."""
        if cursor < 0 or count < 1:
            raise ValueError(f"cursor must be >= 0 and count >= 1, got cursor={cursor}, count={count}")
        places = [divmod(position, len(self.prompts)) for position in range(cursor, cursor + count)]
        return [replace(self.prompts[self._order(epoch)[index]], epoch=epoch) for epoch, index in places]

    def _make_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))

        def rank(index: int) -> bytes:
            key = f"{self.seed}::order{epoch}:{self.prompts[index].prompt_id}"
            return hashlib.blake2b(key.encode(), digest_size=16).digest()

        return sorted(range(len(self.prompts)), key=rank)


class PromptSource:
    """Base of data sources: an endless sequence of prompts from a list. All prompts of a step have one size.

    The prompts of each size are a list with its own order and cursor. A function of seed and cursors decides which size
    is next, so that each is used in proportion to its number of prompts. The cursors are the only state.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        shuffle: bool,
        seed: int,
        held_out: Sequence[Prompt] | None = None,
        sizes: Sequence[Size] = (),
    ) -> None:
        """
        Args:
            held_out: prompts for evaluation; None = `prompts` in their order.
            sizes: each prompt gets one of them; () = the prompts keep their sizes.
        """
        self.shuffle, self.seed, self.sizes = shuffle, seed, sizes
        self.infos = check_images((*prompts, *(held_out or ())))
        self.prompts = tuple(self.sized(prompts))
        self.held_out = self.prompts if held_out is None else tuple(self.sized(held_out))
        self.orders = {group[0].size: PromptOrder(group, shuffle=shuffle, seed=seed) for group in by_size(self.prompts)}
        self.cursors = dict.fromkeys(self.orders, 0)

    def __len__(self) -> int:
        return len(self.prompts)

    def prompts_at(self, cursor: int, count: int, size: Size | None = None) -> list[Prompt]:
        """The prompts of one size at positions `cursor` to `cursor + count - 1`. Changes no state."""
        return self.orders[size].prompts_at(cursor, count)

    def take(self, count: int, size: Size | None = None) -> list[Prompt]:
        """The next `count` prompts, all of one size: `size`, or the one that is due. Moves its cursor."""
        if size is None:
            lengths = [len(order) for order in self.orders.values()]
            key = f"{self.seed}::due" if self.shuffle else None
            size = list(self.orders)[next_due(list(self.cursors.values()), lengths, count, key)]
        prompts = self.prompts_at(self.cursors[size], count, size)
        self.cursors[size] += count
        return prompts

    def sized(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Other prompts, each with the size that its samples have with this source."""
        if not self.sizes:
            return list(prompts)
        return [replace(prompt, size=size_of(prompt, self.sizes, self.infos)) for prompt in prompts]

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        """Held-out prompts in the order of their file, the first `max_prompts` of them (None: all)."""
        return list(self.held_out[:max_prompts])

    def state_dict(self) -> State:
        return {
            "cursors": list(self.cursors.values()),
            "prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: State) -> None:
        """Raises ResumeError (7002) if the prompts differ from those of the checkpoint."""
        if state["fingerprint"] != self.fingerprint:
            raise ResumeError(
                f"the data changed since the checkpoint ({state['prompts']} prompts then, {len(self.prompts)} now, or "
                "other texts, images or sizes), so the prompts would come in another order. Restore the data file, or "
                "start a new run"
            )
        self.cursors = dict(zip(self.orders, map(int, state["cursors"]), strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the sequence of prompts: texts, contents of images, sizes, order and seed.

        Paths do not count, and neither does the order of the file if prompts are shuffled.
        """
        digest = hashlib.blake2b(f"{self.shuffle}:{self.seed if self.shuffle else ''}".encode(), digest_size=16)
        for prompt in sorted(self.prompts, key=lambda prompt: prompt.prompt_id) if self.shuffle else self.prompts:
            media = tuple((ref.modality, ref.role, self._digest(ref.uri)) for ref in prompt.media)
            digest.update(repr((prompt.prompt_id, prompt.text, prompt.metadata, media, prompt.size)).encode())
        return digest.hexdigest()

    def _digest(self, uri: str) -> str:
        return self.infos[uri].digest if uri in self.infos else digest_of(uri)


class MultimodalRLDataSource(PromptSource):
    """Prompts of a file, and held-out prompts of another file for evaluation."""

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
        allow_remote: bool = True,
        remote_hosts: tuple[str, ...] = (),
    ) -> None:
        """The trainer passes the run's seed and the data file of the evaluation block.

        Args:
            eval_data_path: file of the held-out prompts; None = the training prompts in the order of their file.
            data_path: the prompt file: .txt with one prompt per line, .json or .jsonl.
            shuffle: draw prompts in a new random order in each pass over the file.
            prompt_key: key of the prompt in a row of a .json or .jsonl file.
            recorded: roles of the images that are the samples of a prompt, in this order; [] = the policy samples.
            sizes: [height, width] in pixels. Each prompt gets the size whose aspect ratio is nearest to that of its
                image; [] = all samples have the size of `sampling`.
            allow_remote: images may be at URLs; false = only files on this machine.
            remote_hosts: hosts of URLs of images, or buckets of s3 and gs; [] = all.
        """
        prompts = [with_recorded(prompt, recorded) for prompt in load_prompts(data_path, prompt_key=prompt_key)]
        held_out = load_prompts(eval_data_path, prompt_key=prompt_key) if eval_data_path else None
        check_remote((*prompts, *(held_out or ())), allow_remote, remote_hosts)
        super().__init__(prompts, shuffle=shuffle, seed=seed, held_out=held_out, sizes=sizes)


class DefaultDataSource(PromptSource):
    """A few built-in prompts for quick checks without a file."""

    def __init__(self, seed: int = 42, *, shuffle: bool = True) -> None:
        prompts = [Prompt(text=text, prompt_id=f"built-in:{index}") for index, text in enumerate(BUILT_IN)]
        super().__init__(prompts, shuffle=shuffle, seed=seed)
