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
from unirl.models.loading.lora import LoraSpec, adapter_names, choose_targets, initial_adapter_weight, inject_lora
from unirl.models.loading.saved_weights import SavedWeights
from unirl.train.backend.sharding import Sharding
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.facts import ModelFacts
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


def add_adapters(module: nn.Module, lora: LoraConfig | None, facts: ModelFacts, seed: int) -> LoraSpec | None:
    """Inject the adapters that `lora` describes, and return their rank, alpha and targets.

    Returns None if `lora` is None, in which case all weights are trained.
    """
    if lora is None:
        return None
    spec = LoraSpec(lora.rank, lora.alpha, choose_targets(module, lora.target_modules, facts.lora_targets))
    inject_lora(module, spec, seed)
    return spec


def usual_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most elements. Libraries keep the norms and small tables of a bf16 module in a wider dtype."""
    num_elements: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        num_elements[parameter.dtype] += parameter.numel()
    return num_elements.most_common(1)[0][0]


def set_dtypes(module: nn.Module, config: FSDPConfig) -> None:
    """Convert trainable weights to float32 and frozen ones to `config.param_dtype`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif config.param_dtype is not None:
            parameter.data = parameter.data.to(TORCH_DTYPES[config.param_dtype])


def check_component(name: str | None, facts: ModelFacts) -> None:
    """Raises ConfigError (2020) unless `name` is absent or the component with which the model's pipeline samples."""
    if name not in (None, facts.trainable_attr):
        raise IncompatibleError(
            f"backend.trainable_attr={name}: the pipeline of {facts.family} samples and trains with "
            f"{facts.trainable_attr}. Write trainable_attr: {facts.trainable_attr}, or leave the key out"
        )


def blocks_of(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules inside `module` whose class name is in `class_names`, in the order of `module`."""
    return [child for child in module.modules() if type(child).__name__ in class_names]


def require_blocks(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules that `blocks_of` returns. Raises ConfigError (2001) if there is none."""
    blocks = blocks_of(module, class_names)
    if not blocks:
        raise ConfigError(
            f"{type(module).__name__} has no block of {', '.join(class_names)} to shard, checkpoint or compile. "
            "Leave backend.block_class_names out to use the block classes of the model"
        )
    return blocks


def wrap_blocks(blocks: Sequence[nn.Module], config: FSDPConfig) -> None:
    """Compile and checkpoint the forward of each block, if `config` says so."""
    for block in blocks:
        if config.use_torch_compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Checkpoint the compiled forward. In the reverse order, the compiler would not trace into the checkpoint.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


# Modules that were built without storage


def is_deferred(module: nn.Module) -> bool:
    """True while the parameters have no storage."""
    return next(module.parameters()).is_meta


def load_deferred(
    module: nn.Module, sharding: Sharding, saved: SavedWeights, device: torch.device, lora: LoraSpec | None, seed: int
) -> None:
    """Give storage and values to a module that was built without them. This rank reads only the rows of its shards."""
    persistent = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
    give_storage(module, device)
    sharding.adopt(module)
    fill(module, sharding, saved, persistent, 0 if lora is None else lora.rank, seed)


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
    module: nn.Module, sharding: Sharding, saved: SavedWeights, persistent: set[str], rank: int, seed: int
) -> None:
    """Fill this rank's rows of every parameter: the base from the checkpoint, the adapters from the seed.

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
            shard.copy_(initial_adapter_weight(name, tuple(parameter.shape), rank, seed)[rows])
        else:
            shard.copy_(saved.read(base_name(name), rows))
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
