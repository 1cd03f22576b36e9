"""The replay store: a ring of the newest transitions of a worker, from which updates draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from unirl.config.errors import ResumeError
from unirl.types.transitions import Transitions

ADDED = "added"
"""The name of the number of transitions that were ever added, among the saved tensors."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Settings of a replay store."""

    capacity: Annotated[int, Meta(ge=1)] = 1_000_000
    """Transitions that a worker keeps. A new one then replaces the oldest."""
    n_step: Annotated[int, Meta(ge=1)] = 1
    """Rewards that a transition sums before it bootstraps (Sutton 1988); fewer at the end of an episode."""


class ReplayStore:
    """The newest `capacity` transitions. Memory is taken for all of them when the first one arrives."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.columns: dict[str, Tensor] = {}  # name -> [capacity, ...]
        self.added = 0
        """Transitions that were ever added."""

    def __len__(self) -> int:
        return min(self.added, self.config.capacity)

    def add(self, transitions: Transitions) -> None:
        """Add transitions in their order. Of more than the capacity, the last ones remain."""
        capacity = self.config.capacity
        places = torch.arange(self.added, self.added + len(transitions))[-capacity:] % capacity
        for name, values in transitions.tensors().items():
            if name not in self.columns:
                self.columns[name] = torch.zeros(capacity, *values.shape[1:], dtype=values.dtype)
            self.columns[name][places] = values[-capacity:].cpu()
        self.added += len(transitions)

    def skip(self, count: int) -> None:
        """Count transitions that are not kept, of a store that keeps none."""
        assert not self.columns, "a store that keeps transitions adds all of them"
        self.added += count

    def sample(self, count: int, generator: torch.Generator) -> Transitions:
        """`count` transitions, uniform with replacement; a function of the generator's seed and of what is stored."""
        assert self.added, "a store without transitions has nothing to sample"
        places = torch.randint(len(self), (count,), generator=generator)
        return Transitions.of_tensors({name: column[places] for name, column in self.columns.items()})

    # The state that a checkpoint contains

    def state(self) -> dict[str, Tensor]:
        """The stored transitions, and their number."""
        return {ADDED: torch.tensor(self.added)} | {name: values[: len(self)] for name, values in self.columns.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned. Raises ResumeError if it was of another capacity."""
        added = int(tensors[ADDED])
        saved = {name: values for name, values in tensors.items() if name != ADDED}
        expected = min(added, self.config.capacity)
        found = [len(values) for values in saved.values() if len(values) != expected]
        if found:
            raise ResumeError(
                f"the checkpoint's replay store holds {found[0]} transitions, where stack.store.capacity="
                f"{self.config.capacity} would hold {expected}. Resume with the recipe that wrote it, or start again "
                "with resume=none"
            )
        self.columns, self.added = {}, 0
        if saved:
            self.add(Transitions.of_tensors(saved))
        self.added = added
