"""The replay store: a ring of the newest transitions of a worker, from which updates draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from unirl.config.errors import ResumeError
from unirl.types.transitions import Transitions

ADDED, PRIORITIES, LARGEST = "added", "priorities", "largest_priority"
"""Names among the saved tensors: of the number of transitions that were ever added, and of a prioritised store."""


@dataclass(frozen=True, kw_only=True)
class PriorityConfig:
    """Draws in proportion to errors. Schaul et al. 2016, arXiv:1511.05952, section 3.3, the proportional variant.

    P(i) = p_i^alpha / sum_k p_k^alpha,  w_i = (N P(i))^-beta / max_j w_j over the minibatch,  p_i = error_i + epsilon
    """

    alpha: Annotated[float, Meta(ge=0, le=1)] = 0.6
    """0 draws uniformly."""
    beta: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """Exponent of the importance weights at the beginning of a run; it rises linearly to 1 at the end."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-6
    """Added to errors, so that every transition can be drawn."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Settings of a replay store."""

    capacity: Annotated[int, Meta(ge=1)] = 1_000_000
    """Transitions that a worker keeps. A new one then replaces the oldest."""
    n_step: Annotated[int, Meta(ge=1)] = 1
    """Rewards that a transition sums before it bootstraps (Sutton 1988); fewer at the end of an episode."""
    priority: PriorityConfig | None = None
    """Draws transitions with large errors more often. null: all are equally probable."""
    folder: str | None = None
    """Folder in which observations are memory-mapped, for more of them than memory holds. null: in memory.

    The files have no name: their space is free again when the run ends.
    """


@dataclass(frozen=True)
class Draw:
    """Transitions that were drawn, with their places in the ring."""

    places: Tensor  # [N] int64
    transitions: Transitions


class ReplayStore:
    """The newest `capacity` transitions. Memory is taken for all of them when the first one arrives."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.columns: dict[str, Tensor] = {}  # name -> [capacity, ...]
        self.added = 0
        """Transitions that were ever added."""
        self.priorities = torch.zeros(0 if config.priority is None else config.capacity, dtype=torch.float64)
        """[capacity] p_i, or [0]; 0 where there is no transition."""
        self.largest = torch.ones((), dtype=torch.float64)
        """The largest priority so far, which transitions that were never drawn have."""

    def __len__(self) -> int:
        return min(self.added, self.config.capacity)

    def add(self, transitions: Transitions) -> None:
        """Add transitions in their order. Of more than the capacity, the last ones remain."""
        capacity = self.config.capacity
        places = torch.arange(self.added, self.added + len(transitions))[-capacity:] % capacity
        for name, values in transitions.tensors().items():
            if name not in self.columns:
                self.columns[name] = self._column(name, values)
            self.columns[name][places] = values[-capacity:].cpu()
        if self.config.priority is not None:
            self.priorities[places] = self.largest
        self.added += len(transitions)

    def _column(self, name: str, values: Tensor) -> Tensor:
        """[capacity, ...] zeros for such values."""
        shape = (self.config.capacity, *values.shape[1:])
        if self.config.folder is None or "." not in name:  # observations.KEY and following.KEY
            return torch.zeros(shape, dtype=values.dtype)
        with TemporaryFile(dir=Path(self.config.folder).expanduser()) as file:
            size = math.prod(shape)
            file.truncate(max(size * values.element_size(), 1))
            # The map keeps the file after its name and descriptor are gone.
            mapped = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=size, dtype=values.dtype)
        return mapped.view(shape)

    def skip(self, count: int) -> None:
        """Count transitions that are not kept, of a store that keeps none."""
        assert not self.columns, "a store that keeps transitions adds all of them"
        self.added += count

    def sample(self, count: int, generator: torch.Generator) -> Draw:
        """`count` transitions, uniform with replacement; a function of the generator's seed and of what is stored."""
        assert self.added, "a store without transitions has nothing to sample"
        places = torch.randint(len(self), (count,), generator=generator)
        return Draw(places, self.rows(places))

    def rows(self, places: Tensor) -> Transitions:
        """The transitions at these places [N] of the ring."""
        return Transitions.of_tensors({name: column[places] for name, column in self.columns.items()})

    def draw(self, count: int, generator: torch.Generator, progress: float) -> Draw:
        """`count` transitions by their priorities, with replacement; uniform ones if the store is not prioritised.

        Args:
            progress: of the run, from 0 to 1.
        """
        config = self.config.priority
        if config is None:
            return self.sample(count, generator)
        assert self.added, "a store without transitions has nothing to sample"
        powers = self.priorities[: len(self)] ** config.alpha
        totals = powers.cumsum(0)
        points = torch.rand(count, dtype=torch.float64, generator=generator) * totals[-1]
        places = torch.searchsorted(totals, points, right=True).clamp(max=len(self) - 1)
        beta = config.beta + (1 - config.beta) * progress
        weights = (len(self) * powers[places] / totals[-1]) ** -beta
        return Draw(places, replace(self.rows(places), weights=(weights / weights.max()).float()))

    def report(self, places: Tensor, errors: Tensor) -> None:
        """Set the priorities of drawn transitions [N] from their errors [N]; one drawn twice gets its larger error."""
        if self.config.priority is not None:
            found = errors.detach().double().cpu() + self.config.priority.epsilon
            self.priorities.scatter_reduce_(0, places, found, "amax", include_self=False)
            self.largest = torch.maximum(self.largest, found.max())

    # The state that a checkpoint contains

    def state(self) -> dict[str, Tensor]:
        """The stored transitions, and their number."""
        kept = {ADDED: torch.tensor(self.added)} | {name: values[: len(self)] for name, values in self.columns.items()}
        if self.config.priority is not None:
            kept |= {PRIORITIES: self.priorities[: len(self)], LARGEST: self.largest}
        return kept

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned. Raises ResumeError if it was of another capacity or other priorities."""
        added = int(tensors[ADDED])
        if (PRIORITIES in tensors) != (self.config.priority is not None):
            raise ResumeError(
                f"stack.store.priority={self.config.priority}, and the checkpoint's replay store is "
                f"{'' if PRIORITIES in tensors else 'not '}prioritised. Resume with the recipe that wrote it, or start "
                "again with resume=none"
            )
        saved = {name: values for name, values in tensors.items() if name not in (ADDED, PRIORITIES, LARGEST)}
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
        if self.config.priority is not None:
            self.priorities[:expected] = tensors[PRIORITIES]
            self.largest = tensors[LARGEST].clone()
