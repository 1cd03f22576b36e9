"""An estimate of device memory by part and phase, computed from sizes without loading a model."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

GIB = 2**30
MASTER_BYTES = 4
"""Trainable weights, gradients, snapshots and each of AdamW's two moments are float32."""
ACTIVATION_BYTES_PER_BLOCK = 17
"""Bytes stored for the backward pass per token, channel and byte of the compute dtype.

This is 34 bytes at 16 bits: arXiv:2205.05198, eq. 1, without the attention matrix, which fused attention does not
store.
"""
LIVE_BYTES_WITHOUT_GRAD = 12
"""The same without gradients: the residual, q, k, v and the widened layer of the block that runs."""

PHASES = ("sync", "generate", "reward", "train")
"""The phases of a step. Evaluation needs the memory of generate and reward together."""


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """The sizes that determine the memory of a run on one device."""

    policy_parameters: int
    other_parameters: int  # of encoders and VAE
    trainable_parameters: int
    dtype_bytes: int
    full_training: bool
    num_snapshots: int
    tokens: int  # of one sample, at most
    width: int
    num_blocks: int
    cache_width: int = 0  # numbers that sampling caches per token
    rollout_rows: int  # rows of one forward in rollout, guidance included
    train_rows: int  # rows of one forward in training, guidance and steps per forward included
    recompute: bool
    keep_resident: bool  # encoders and VAE stay on the device while idle
    num_shards: int  # devices that share one copy of the trained module
    engine_dtype_bytes: int  # of a dedicated engine's network; 0 = the engine borrows the trained one


@dataclass(frozen=True)
class MemoryRow:
    """Memory of one kind on one device, in each phase."""

    role: str  # of the memory, such as gradients
    part: str  # of the residency table
    gib: Mapping[str, float]


def memory_table(sizes: MemoryInputs, resident: Mapping[str, Collection[str]]) -> list[MemoryRow]:
    """The rows whose sum is the peak of each phase.

    Args:
        resident: phase to the parts that are on their devices in that phase.
    """
    policy = _policy_bytes(sizes)
    return [
        MemoryRow(role, part, {phase: size / GIB * (part in resident[phase] and phase in when) for phase in PHASES})
        for role, part, size, when in (*_training_items(sizes, policy), *_sampling_items(sizes, policy))
    ]


def peak(rows: Collection[MemoryRow]) -> Mapping[str, float]:
    """GiB by phase."""
    return {phase: sum(row.gib[phase] for row in rows) for phase in PHASES}


MemoryItem = tuple[str, str, float, Collection[str]]
"""Name, the part that it belongs to, bytes, and the phases in which it exists."""


def _training_items(sizes: MemoryInputs, policy: int) -> Iterator[MemoryItem]:
    trainable = sizes.trainable_parameters * MASTER_BYTES / sizes.num_shards
    yield "policy weights", "policy", policy / sizes.num_shards, PHASES
    yield "adapters", "policy", 0 if sizes.full_training else trainable, PHASES
    yield "gradients", "policy", trainable, ("train",)
    yield "optimizer (AdamW)", "optimizer", 2 * trainable, PHASES
    yield "snapshots", "policy", sizes.num_snapshots * trainable, PHASES
    yield "activations of training", "policy", _stored_bytes(sizes), ("train",)


def _sampling_items(sizes: MemoryInputs, policy: int) -> Iterator[MemoryItem]:
    """Memory of sampling, either with the trained module, gathered for it, or in an engine with its own weights."""
    adapters = 0 if sizes.full_training else sizes.trainable_parameters * MASTER_BYTES
    borrows = sizes.engine_dtype_bytes == 0
    part, frozen = ("policy", "frozen") if borrows else ("engine", "engine")
    if borrows:
        missing = (policy + adapters) * (1 - 1 / sizes.num_shards)
        yield "other shards, gathered", part, missing, ("generate",)
    else:
        yield "engine weights", part, sizes.policy_parameters * sizes.engine_dtype_bytes + adapters, PHASES
    in_use = PHASES if sizes.keep_resident else ("generate",)
    yield "encoders and VAE", frozen, sizes.other_parameters * sizes.dtype_bytes, in_use
    yield "activations of sampling", part, _live_bytes(sizes), ("generate",)
    yield "keys and values", part, _cache_bytes(sizes), ("generate",)


def _policy_bytes(sizes: MemoryInputs) -> int:
    return sizes.policy_parameters * (MASTER_BYTES if sizes.full_training else sizes.dtype_bytes)


def _live_bytes(sizes: MemoryInputs) -> int:
    return sizes.rollout_rows * sizes.tokens * sizes.width * sizes.dtype_bytes * LIVE_BYTES_WITHOUT_GRAD


def _cache_bytes(sizes: MemoryInputs) -> int:
    return sizes.rollout_rows * sizes.tokens * sizes.cache_width * sizes.dtype_bytes


def _stored_bytes(sizes: MemoryInputs) -> int:
    per_channel = sizes.train_rows * sizes.tokens * sizes.width * sizes.dtype_bytes
    if sizes.recompute:
        return per_channel * (sizes.num_blocks + ACTIVATION_BYTES_PER_BLOCK)
    return per_channel * sizes.num_blocks * ACTIVATION_BYTES_PER_BLOCK
