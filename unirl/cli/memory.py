"""An estimate of device memory by role and phase, from sizes alone: nothing is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
MASTER_BYTES = 4
"""Trainable weights, gradients, snapshots and each of AdamW's two moments are float32."""
ACTIVATION_BYTES_PER_BLOCK = 17
"""Stored for backward per token, channel and byte of the compute dtype: 34 bytes at 16 bits (arXiv:2205.05198, eq. 1,
without the attention matrix, which fused attention does not store)."""
LIVE_BYTES_WITHOUT_GRAD = 12
"""The same without a graph: the residual, q, k, v and the widened layer of the one block that runs."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the memory of a run on one device."""

    policy_parameters: int
    other_parameters: int  # encoders and VAE
    trainable_parameters: int
    dtype_bytes: int
    full_training: bool
    num_snapshots: int
    tokens: int  # image and text tokens of one sample
    width: int
    num_blocks: int
    rollout_rows: int  # rows of one forward in rollout, guidance included
    train_rows: int  # rows of one forward in training, guidance and steps per forward included
    recompute: bool
    keep_resident: bool  # encoders and VAE stay on the device while idle


@dataclass(frozen=True)
class Row:
    """GiB of one thing in each phase."""

    role: str
    rollout: float
    train: float


def table(sizes: Sizes) -> list[Row]:
    """The rows that add up to the peak of each phase."""
    return [
        _resident("policy weights", _policy_bytes(sizes)),
        _resident("adapters", 0 if sizes.full_training else sizes.trainable_parameters * MASTER_BYTES),
        _one_phase("gradients", train=sizes.trainable_parameters * MASTER_BYTES),
        _resident("optimizer (AdamW)", 2 * sizes.trainable_parameters * MASTER_BYTES),
        _resident("snapshots", sizes.num_snapshots * sizes.trainable_parameters * MASTER_BYTES),
        _idle_in_train("encoders and VAE", sizes.other_parameters * sizes.dtype_bytes, not sizes.keep_resident),
        _one_phase("activations", rollout=_live_bytes(sizes), train=_stored_bytes(sizes)),
    ]


def peak(rows: list[Row]) -> Mapping[str, float]:
    """GiB by phase."""
    return {"rollout": sum(row.rollout for row in rows), "train": sum(row.train for row in rows)}


def _policy_bytes(sizes: Sizes) -> int:
    return sizes.policy_parameters * (MASTER_BYTES if sizes.full_training else sizes.dtype_bytes)


def _live_bytes(sizes: Sizes) -> int:
    return sizes.rollout_rows * sizes.tokens * sizes.width * sizes.dtype_bytes * LIVE_BYTES_WITHOUT_GRAD


def _stored_bytes(sizes: Sizes) -> int:
    per_channel = sizes.train_rows * sizes.tokens * sizes.width * sizes.dtype_bytes
    if sizes.recompute:
        return per_channel * (sizes.num_blocks + ACTIVATION_BYTES_PER_BLOCK)
    return per_channel * sizes.num_blocks * ACTIVATION_BYTES_PER_BLOCK


def _resident(role: str, size: int) -> Row:
    return Row(role, size / GIB, size / GIB)


def _one_phase(role: str, rollout: int = 0, train: int = 0) -> Row:
    return Row(role, rollout / GIB, train / GIB)


def _idle_in_train(role: str, size: int, offload: bool) -> Row:
    return _one_phase(role, rollout=size, train=0 if offload else size)
