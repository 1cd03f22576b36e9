"""Named copies of the trainable weights: reference, old, ema, a target, a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unirl.config.errors import ConfigError, IncompatibleError

LIVE = "live"


class Snapshots:
    """Copies of a set of parameters, by name, on the parameters' device."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Args:
            parameters: with sharding, this rank's shards of them.
        """
        self.parameters = parameters
        self.stored: dict[str, dict[str, Tensor]] = {}
        self.in_force = LIVE

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Keep the present weights as `name`, replacing an earlier snapshot of that name."""
        if name == LIVE:
            raise ConfigError(f"{LIVE!r} names the weights that are trained; a snapshot needs another name")
        self.stored[name] = {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def average(self, name: str, decay: float) -> None:
        """snapshot <- decay * snapshot + (1 - decay) * live."""
        shadows = list(self.stored[name].values())
        live: list[Tensor] = list(self.parameters.values())
        if decay == 0.0:
            torch._foreach_copy_(shadows, live)
        else:
            # Not lerp: what it fuses depends on an element's place in a tensor, and so on the number of shards.
            gaps = torch._foreach_sub(live, shadows)
            torch._foreach_mul_(gaps, 1.0 - decay)
            torch._foreach_add_(shadows, gaps)

    def require(self, name: str) -> None:
        """Raises ConfigError unless a snapshot `name` exists."""
        if name not in self.stored:
            raise IncompatibleError(
                f"there is no weight snapshot {name!r}; there are {sorted(self.stored)}. `ema` comes from "
                "backend.ema_cfg, `old` from backend.ema_lora_cfg, `reference` from an algorithm that reads it"
            )

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """The parameters hold the snapshot's values inside, and exactly their own afterwards.

        Values are copied, not swapped by pointer: sharded and compiled modules keep references to the storage.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(f"weights({name!r}) needs torch.no_grad(): a graph built inside would see other weights")
        if self.in_force != LIVE:
            raise RuntimeError(f"weights({name!r}) inside weights({self.in_force!r}): snapshots do not nest")
        if name == LIVE:
            yield
            return
        self.require(name)
        live = [p.detach().clone() for p in self.parameters.values()]
        self.in_force = name
        try:
            self._fill(list(self.stored[name].values()))
            yield
        finally:
            self._fill(live)
            self.in_force = LIVE

    @torch.no_grad()
    def _fill(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(list(self.parameters.values()), values)

    def to(self, device: torch.device) -> None:
        """Move all copies."""
        for name, tensors in self.stored.items():
            self.stored[name] = {key: tensor.to(device) for key, tensor in tensors.items()}
