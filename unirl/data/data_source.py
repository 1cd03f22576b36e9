"""Where prompts come from. Which prompt is drawn is a pure function of (seed, number of the draw)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from unirl.config.errors import CheckpointError
from unirl.data.datasets import Prompt, load_prompts, with_recorded
from unirl.data.images import check_images, digest_of
from unirl.types.primitives import RecordedRole
from unirl.types.protocols import State

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


class PromptSource(ABC):
    """Endless draws from a list of prompts: every prompt once per epoch, in an order that only seed and epoch decide.

    Draw number c is prompt `order(epoch)[c mod n]` of epoch `c div n`, so a batch may span epochs; the epoch is part of
    a draw's group id, and nothing but the cursor has to be saved. The order sorts prompts by a keyed hash of their ids:
    it survives a reordered file and does not depend on any generator's implementation.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self.prompts = tuple(prompts)
        self.shuffle, self.seed = shuffle, seed
        self.cursor = 0
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """Draws number `cursor` to `cursor + count - 1`; changes nothing."""
        if cursor < 0 or count < 1:
            raise ValueError(f"cursor must be >= 0 and count >= 1, got cursor={cursor}, count={count}")
        return [self._draw(number) for number in range(cursor, cursor + count)]

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` draws; moves the cursor."""
        prompts = self.take(self.cursor, count)
        self.cursor += count
        return prompts

    @abstractmethod
    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        """Held-out prompts in the order of their file, the first `max_prompts` of them (None: all)."""

    def state_dict(self) -> State:
        return {"cursor": self.cursor, "prompts": len(self.prompts), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """Raises CheckpointError (7002) when the prompts are not those that the checkpoint was made with."""
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"the data changed since the checkpoint: {len(self.prompts)} prompts now, {state['prompts']} then, or "
                "their texts differ, so the order of draws would be another. Restore the data file, or start a new run",
                code=7002,
            )
        self.cursor = int(state["cursor"])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the draws, the contents of pictures included, and not where files lie.

        Shuffled prompts may stand in the file in any order.
        """
        digest = hashlib.blake2b(f"{self.shuffle}:{self.seed if self.shuffle else ''}".encode(), digest_size=16)
        for prompt in sorted(self.prompts, key=lambda prompt: prompt.prompt_id) if self.shuffle else self.prompts:
            media = tuple((ref.modality, ref.role, digest_of(ref)) for ref in prompt.media)
            digest.update(repr((prompt.prompt_id, prompt.text, prompt.metadata, media)).encode())
        return digest.hexdigest()

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


class MultimodalRLDataSource(PromptSource):
    """Prompts of a file (`readers.py`), and held-out ones of another for evaluation."""

    def __init__(
        self,
        seed: int = 42,
        eval_data_path: str | None = None,
        *,
        data_path: str,
        shuffle: bool = True,
        prompt_key: str = "prompt",
        recorded: tuple[RecordedRole, ...] = (),
    ) -> None:
        """The trainer gives the run's seed, and the evaluation block's file (absent: the training file, unshuffled).

        Args:
            recorded: the samples of a prompt are its pictures of these roles, in this order; [] = samples are drawn.
        """
        prompts = load_prompts(Path(data_path), prompt_key=prompt_key)
        super().__init__(with_recorded(prompts, recorded), shuffle=shuffle, seed=seed)
        self.held_out = load_prompts(Path(eval_data_path), prompt_key=prompt_key) if eval_data_path else self.prompts
        check_images(self.prompts if self.held_out is self.prompts else (*self.prompts, *self.held_out))

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        return list(self.held_out[:max_prompts])


class DefaultDataSource(PromptSource):
    """A few built-in prompts, for smoke checks: no file is needed."""

    def __init__(self, seed: int = 42, *, shuffle: bool = True) -> None:
        prompts = [Prompt(text=text, prompt_id=f"built-in:{index}") for index, text in enumerate(BUILT_IN)]
        super().__init__(prompts, shuffle=shuffle, seed=seed)

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        return list(self.prompts[:max_prompts])
