"""Classifier-free guidance: v = v_uncond + w (v_cond - v_uncond). Ho & Salimans 2022 (arXiv:2207.12598).

The conditions of the unconditional branch carry the prefix `negative_`. Both branches get gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.types.batch import Batch
from unirl.types.conditions import Conditions

NEGATIVE = "negative_"
Network = Callable[[Tensor, Tensor, Conditions], Tensor]


@dataclass(frozen=True)
class Guidance:
    """How strongly and in how many forwards."""

    scale: float = 1.0
    """w; 1 is no guidance, and needs no negative condition."""
    passes: int = 1
    """1 = one forward of a doubled batch; 2 = two forwards."""

    @property
    def active(self) -> bool:
        return self.scale != 1.0

    def feeds(self, conditions: Conditions) -> tuple[Conditions, ...]:
        """The conditions of each forward: computed once, used at every step."""
        positive = {name: c for name, c in conditions.items() if not name.startswith(NEGATIVE)}
        if not self.active:
            return (positive,)
        negative = {name: self._negative(conditions, name) for name in positive}
        if self.passes == 2:
            return (negative, positive)
        return ({name: type(c).concat([negative[name], c]) for name, c in positive.items()},)

    def velocity(self, network: Network, x: Tensor, sigma: Tensor, feeds: tuple[Conditions, ...]) -> Tensor:
        """The guided velocity [B, *latent] at `x`, `sigma` [B], with what `feeds` returned."""
        if not self.active:
            return network(x, sigma, feeds[0])
        if self.passes == 2:
            uncond, cond = network(x, sigma, feeds[0]), network(x, sigma, feeds[1])
        else:
            uncond, cond = network(torch.cat([x, x]), torch.cat([sigma, sigma]), feeds[0]).chunk(2)
        return uncond + self.scale * (cond - uncond)

    def _negative(self, conditions: Conditions, name: str) -> Batch:
        if NEGATIVE + name not in conditions:
            raise ValueError(
                f"guidance_scale={self.scale} needs the condition {NEGATIVE + name!r}; there are {sorted(conditions)}"
            )
        return conditions[NEGATIVE + name]
