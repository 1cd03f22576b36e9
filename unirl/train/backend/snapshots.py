"""Named copies of the weights: `reference`, `old`, `ema`, and a `teacher` that is loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unirl.config.errors import ConfigError, IncompatibleError, InvalidValueError, NotFoundError
from unirl.models.base import Bundle
from unirl.models.loading.lora import adapter_names
from unirl.train.backend.module_setup import base_name, check_saved
from unirl.train.backend.sharding import Sharding
from unirl.train.configs import SnapshotConfig
from unirl.types.device import CPU, to_device, to_host

LIVE = "live"


class Snapshots:
    """Copies of the trained parameters, by name, on the parameters' device. With sharding, this rank's shards."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.parameters = sharding.shards
        self.stored: dict[str, dict[str, Tensor]] = {}
        """Snapshot name -> values of `parameters`."""
        self.frozen: dict[str, dict[str, Tensor]] = {}
        """Name of a snapshot from another checkpoint -> its values of the parameters that are not trained.

        These snapshots never change, so a run's checkpoints omit them.
        """
        self.active = LIVE
        """Name of the weights that the parameters currently hold."""

    @torch.no_grad()
    def take(self, name: str) -> None:
        """Keep a copy of the current weights as `name`, replacing an earlier snapshot of that name."""
        if name == LIVE:
            raise ConfigError(f"{LIVE!r} is the name of the trained weights. Give the snapshot another name")
        self.stored[name] = {key: p.detach().clone() for key, p in self.parameters.items()}

    @torch.no_grad()
    def load(self, name: str, source: SnapshotConfig, bundle: Bundle, module: nn.Module) -> None:
        """Load the checkpoint of `source` as the snapshot `name`. Each rank reads only the rows of its shards.

        Raises:
            ConfigError: 2004 if the backend itself makes a snapshot of that name.
            DataError: 4001 if there is no such checkpoint, or if it is of another architecture.
        """
        if name == LIVE or name in self.stored:
            raise InvalidValueError(
                f"backend.snapshots.{name}: the backend makes this snapshot from the trained weights. Use another name"
            )
        sharding, adapters = self.sharding, set(adapter_names(module))
        base = {key: parameter for key, parameter in sharding.parameters.items() if key not in adapters}
        try:
            saved = bundle.saved_at(source.path, source.revision)
            check_saved(type(module).__name__, saved.shapes(), base)
        except NotFoundError as error:
            raise NotFoundError(f"backend.snapshots.{name}: {error}") from error
        values = {key: torch.zeros_like(sharding.shard(parameter)) for key, parameter in sharding.parameters.items()}
        for key, parameter in base.items():  # adapters stay zero, so that they add nothing to the base weights
            values[key].copy_(saved.read(base_name(key), sharding.rows(parameter)))
        self.stored[name] = {key: values.pop(key) for key in self.parameters}
        self.frozen[name] = values

    @property
    def changing(self) -> dict[str, dict[str, Tensor]]:
        """The snapshots that follow training. The checkpoints of a run contain them."""
        return {name: values for name, values in self.stored.items() if name not in self.frozen}

    @torch.no_grad()
    def average(self, name: str, decay: float) -> None:
        """snapshot <- decay * snapshot + (1 - decay) * live."""
        shadows = list(self.stored[name].values())
        live: list[Tensor] = list(self.parameters.values())
        if decay == 0.0:
            torch._foreach_copy_(shadows, live)
        else:
            # lerp is not used: its bits depend on an element's position in a tensor, hence on the number of shards.
            gaps = torch._foreach_sub(live, shadows)
            torch._foreach_mul_(gaps, 1.0 - decay)
            torch._foreach_add_(shadows, gaps)

    def require(self, name: str) -> None:
        """Raises ConfigError (2020) unless a snapshot `name` exists."""
        if name not in self.stored:
            raise IncompatibleError(
                f"there is no weight snapshot {name!r}. The existing ones are {sorted(self.stored)}. Set "
                "backend.ema_cfg for `ema`, backend.ema_lora_cfg for `old`, and backend.snapshots for any other, such "
                "as `teacher`. `reference` exists if the algorithm reads it"
            )

    def trained_values(self, name: str) -> Mapping[str, Tensor]:
        """The snapshot's values of the trained parameters.

        Raises ConfigError (2020) if the snapshot does not exist, or if it differs from the policy in frozen weights.
        """
        self.require(name)
        if self.frozen.get(name):
            raise IncompatibleError(
                f"the snapshot {name!r} was loaded from another checkpoint and differs from the policy in weights that "
                "are not trained, so adapters cannot represent it. Evaluate or export that checkpoint directly"
            )
        return self.stored[name]

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Copy the snapshot's values into the parameters inside the block, and restore the live values exactly.

        Values are copied instead of exchanging storage, because sharded and compiled modules keep references to it.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"weights({name!r}) needs torch.no_grad(): the backward pass of a graph that is built inside would "
                "read other weights"
            )
        if self.active != LIVE:
            raise RuntimeError(
                f"weights({name!r}) was entered inside weights({self.active!r}), and snapshots do not nest. Leave the "
                "outer block first"
            )
        if name == LIVE:
            yield
            return
        self.require(name)
        live = [p.detach().clone() for p in self.parameters.values()]
        self.active = name
        self._fill(list(self.stored[name].values()))
        self._exchange_frozen(name)
        try:
            yield
        finally:
            self._exchange_frozen(name)
            self._fill(live)
            self.active = LIVE

    @torch.no_grad()
    def _fill(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(list(self.parameters.values()), values)

    @torch.no_grad()
    def _exchange_frozen(self, name: str) -> None:
        """Exchange the policy's frozen weights with those of a loaded snapshot, one tensor at a time to save memory."""
        for key, stored in self.frozen.get(name, {}).items():
            shard = self.sharding.shard(self.sharding.parameters[key])
            policy_values = shard.detach().clone()
            shard.copy_(stored)
            stored.copy_(policy_values)

    def to(self, device: torch.device) -> None:
        """Move all snapshots to `device`."""
        for snapshots in (self.stored, self.frozen):
            for name, tensors in snapshots.items():
                moved = (
                    to_host(list(tensors.values()))
                    if device == CPU
                    else [to_device(tensor, device) for tensor in tensors.values()]
                )
                snapshots[name] = dict(zip(tensors, moved, strict=True))
