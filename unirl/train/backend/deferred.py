"""Weights for a module that was built without storage, filled in piece by piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.lora import adapter_names, initial_adapter_weight
from unirl.models.loading.saved_weights import SavedWeights
from unirl.train.backend.sharding import Sharding


def is_deferred(module: nn.Module) -> bool:
    """Whether the parameters have no storage yet."""
    return next(module.parameters()).is_meta


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Uninitialised storage for every parameter; buffers that were computed keep their values."""
    computed = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    tied = tied_names(module)
    module.to_empty(device=device)
    for name, first in tied.items():  # storage was given to each by itself
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for name, buffer in module.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, each with the first one: a head tied to the embedding."""
    first: dict[int, str] = {}
    names = [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    return {name: first[key] for name, key in names if first.setdefault(key, name) != name}


@torch.no_grad()
def fill(
    module: nn.Module, sharding: Sharding, saved: SavedWeights, persistent: set[str], rank: int, seed: int
) -> None:
    """This rank's rows of every parameter: the base from the checkpoint, adapters as a function of the seed.

    Args:
        persistent: names of the buffers that the checkpoint holds.
        rank: of the adapters.
    """
    adapters = set(adapter_names(module))
    wanted: dict[str, Tensor] = {n: p for n, p in sharding.parameters.items() if n not in adapters}
    wanted |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    _check(type(module).__name__, saved.shapes(), wanted)
    for name, parameter in sharding.parameters.items():
        rows, shard = sharding.rows(parameter), sharding.shard(parameter)
        if name in adapters:
            shard.copy_(initial_adapter_weight(name, tuple(parameter.shape), rank, seed)[rows])
        else:
            shard.copy_(saved.read(base_name(name), rows))
    for name, buffer in module.named_buffers():
        if name in persistent:
            buffer.copy_(saved.read(base_name(name)))


def base_name(name: str) -> str:
    """The name that a parameter had before adapters were put around its layer."""
    return name.replace(".base_layer.", ".")


def _check(model: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]) -> None:
    missing = [base_name(name) for name in wanted if base_name(name) not in found]
    misshapen = [n for n, t in wanted.items() if base_name(n) in found and found[base_name(n)] != tuple(t.shape)]
    for problem, names in (("are missing", missing), ("have another shape", misshapen)):
        if names:
            raise NotFoundError(
                f"{len(names)} weights of {model} {problem} in its checkpoint: {', '.join(names[:5])}. Use a complete "
                "checkpoint of this architecture, or bundle.meta_init=false"
            )
