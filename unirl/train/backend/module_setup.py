"""Prepares a bundle's module for training, in place: adapters, dtypes, checkpointed and compiled blocks, storage.

`FSDPBackend` must call these functions in a fixed order. `FSDPBackend.prepare_module` explains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.config.errors import ConfigError, IncompatibleError, NotFoundError
from unirl.models.base import Bundle
from unirl.models.loading.adapter_sources import starting_weights
from unirl.models.loading.compiled import compile_blocks
from unirl.models.loading.completeness import QUANTIZED
from unirl.models.loading.dtypes import kept_parameters
from unirl.models.loading.lora import (
    AdapterStart,
    adapter_names,
    choose_targets,
    initial_adapter_weight,
    inject_lora,
)
from unirl.models.loading.saved_weights import SavedWeights
from unirl.train.backend.sharding import GatherDtype, Sharding
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.facts import LoraSpec, ModelFacts
from unirl.types.protocols import TORCH_DTYPES


def refuse_dropout(module: nn.Module) -> None:
    """Raises ConfigError (2020) when a dropout layer of `module` has a probability above 0.

    The policy runs in eval mode in rollout and training, so that an importance ratio compares equal networks. A dropout
    layer would have no effect.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise IncompatibleError(
                f"{type(module).__name__}.{name} has dropout {child.p}, which would have no effect because the policy "
                "runs in eval mode in rollout and training. Set the model's dropout to 0"
            )


def add_adapters(bundle: Bundle, lora: LoraConfig, seed: int) -> tuple[LoraSpec, AdapterStart | None]:
    """Inject the adapters that `lora` describes. Returns their settings, and the values of the file they start from."""
    module = bundle.trainable()
    spec = LoraSpec(lora.rank, lora.alpha, choose_targets(module, lora.target_modules, bundle.facts.lora_targets))
    start = None if lora.path is None else starting_weights(bundle.read_adapter(lora.path), spec, lora.path)
    inject_lora(module, spec, seed, start)
    return spec, start


def usual_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most elements. Libraries keep the norms and small tables of a bf16 module in a wider dtype."""
    num_elements: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        num_elements[parameter.dtype] += parameter.numel()
    return num_elements.most_common(1)[0][0]


def set_dtypes(module: nn.Module, config: FSDPConfig) -> None:
    """Convert trainable weights to float32, and frozen ones to `config.param_dtype` unless their class keeps them."""
    dtype = None if config.param_dtype is None else TORCH_DTYPES[config.param_dtype]
    kept = set() if dtype is None else kept_parameters(module, dtype)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif dtype is not None and name not in kept:
            parameter.data = parameter.data.to(dtype)


def gather_dtype(module: nn.Module, config: FSDPConfig, compute_dtype: torch.dtype, frozen_base: bool) -> GatherDtype:
    """The dtype in which sharded parameters are gathered.

    A frozen base is stored in the dtypes in which it computes, so
    its adapters alone would be converted. They stay float32 if the base has several dtypes, because FSDP2 gathers
    a block in one.
    """
    kept = kept_parameters(module, compute_dtype)
    narrow = config.mixed_precision and compute_dtype != torch.float32 and not (frozen_base and kept)
    return GatherDtype(compute_dtype if narrow else None, kept)


def check_component(name: str | None, facts: ModelFacts) -> None:
    """Raises ConfigError (2020) unless `name` is absent or the component with which the model's pipeline samples."""
    if name not in (None, facts.trainable_attr):
        raise IncompatibleError(
            f"backend.trainable_attr={name}: the pipeline of {facts.family} samples and trains with "
            f"{facts.trainable_attr}. Write trainable_attr: {facts.trainable_attr}, or leave the key out"
        )


def blocks_of(module: nn.Module, class_names: Sequence[str], *, required: bool = False) -> list[nn.Module]:
    """The modules inside `module` whose class name is in `class_names`, in the order of `module`.

    Raises ConfigError (2001) if they are `required` and there is none.
    """
    blocks = [child for child in module.modules() if type(child).__name__ in class_names]
    if required and not blocks:
        raise ConfigError(
            f"{type(module).__name__} has no block of {', '.join(class_names)} to shard, checkpoint or compile. "
            "Leave backend.block_class_names out to use the block classes of the model"
        )
    return blocks


def wrap_blocks(blocks: Sequence[nn.Module], config: FSDPConfig) -> None:
    """Compile and checkpoint the forward of each block, if `config` says so."""
    if config.use_torch_compile:
        compile_blocks(blocks)
    if config.activation_checkpointing:
        for block in blocks:
            # Checkpoint the compiled forward. In the reverse order, the compiler would not trace into the checkpoint.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


# Modules that were built without storage


def load_deferred(
    module: nn.Module,
    sharding: Sharding,
    saved: SavedWeights,
    device: torch.device,
    lora: LoraSpec | None,
    seed: int,
    start: AdapterStart | None = None,
) -> None:
    """Give storage and values to a module that was built without them. This rank reads only the rows of its shards.

    Args:
        start: the values with which adapters start, see `initial_adapter_weight`.
    """
    persistent = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
    give_storage(module, device)
    sharding.adopt(module)
    fill(module, sharding, saved, persistent, 0 if lora is None else lora.rank, seed, start)


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Give uninitialised storage to every parameter. Buffers that already have storage keep their values."""
    computed = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    tied = tied_names(module)
    module.to_empty(device=device)
    for name, first in tied.items():  # to_empty gave separate storage to tied parameters
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, module.get_parameter(first))
    for name, buffer in module.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map each further name of a parameter to its first name, as for a head that is tied to the embedding."""
    first: dict[int, str] = {}
    names = [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    return {name: first[key] for name, key in names if first.setdefault(key, name) != name}


@torch.no_grad()
def fill(
    module: nn.Module,
    sharding: Sharding,
    saved: SavedWeights,
    persistent: set[str],
    rank: int,
    seed: int,
    start: AdapterStart | None,
) -> None:
    """Fill this rank's rows of every parameter: the base from the checkpoint, the adapters from the seed and `start`.

    Args:
        persistent: names of the buffers that the checkpoint holds.
        rank: bottleneck width of the adapters, 0 without adapters.
    """
    adapters = set(adapter_names(module))
    expected: dict[str, Tensor] = {n: p for n, p in sharding.parameters.items() if n not in adapters}
    expected |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    check_saved(type(module).__name__, saved.shapes(), expected)
    for name, parameter in sharding.parameters.items():
        rows, shard = sharding.rows(parameter), sharding.shard(parameter)
        if name in adapters:
            shard.copy_(initial_adapter_weight(name, tuple(parameter.shape), rank, seed, start)[rows])
        else:
            values = saved.read(base_name(name), rows)
            if not values.is_floating_point():
                raise NotFoundError(f"{base_name(name)} of {type(module).__name__} is {values.dtype}. {QUANTIZED}")
            shard.copy_(values)
    for name, buffer in module.named_buffers():
        if name in persistent:
            buffer.copy_(saved.read(base_name(name)))


def base_name(name: str) -> str:
    """The name that a parameter had before its layer was wrapped by an adapter."""
    return name.replace(".base_layer.", ".")


def check_saved(model: str, shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, Tensor]) -> None:
    """Raises DataError (4001) unless `shapes` of a checkpoint contains every expected tensor with the same shape."""
    missing = [base_name(name) for name in expected if base_name(name) not in shapes]
    misshapen = [n for n, t in expected.items() if base_name(n) in shapes and shapes[base_name(n)] != tuple(t.shape)]
    for problem, names in (("are missing", missing), ("have another shape", misshapen)):
        if names:
            raise NotFoundError(
                f"{len(names)} weights of {model} {problem} in its checkpoint: {', '.join(names[:5])}. Use a complete "
                "checkpoint of this architecture, or bundle.meta_init=false"
            )
