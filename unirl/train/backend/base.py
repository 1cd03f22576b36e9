"""The contract of a train backend: trainable weights, optimizer steps, named snapshots and checkpoints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from unirl.config.errors import ConfigError, InvalidValueError
from unirl.distributed.group.dispatch import broadcast, rank0
from unirl.distributed.weight_sync.base import Payload
from unirl.train.backend.health import NonFinite
from unirl.types.facts import LoraSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW (arXiv:1711.05101)."""

    learning_rate: float
    """Peak learning rate per update. `scheduler_cfg` scales it."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise InvalidValueError(f"optimizer_cfg.learning_rate must be > 0, got {self.learning_rate}")
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise InvalidValueError(f"optimizer_cfg.{name} must lie in [0, 1), got {beta}")
        if self.adam_epsilon <= 0 or self.weight_decay < 0:
            raise InvalidValueError(
                f"optimizer_cfg needs adam_epsilon > 0 and weight_decay >= 0, got {self.adam_epsilon} and "
                f"{self.weight_decay}"
            )


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """The learning rate over updates: a linear warmup, then constant, or a decay to a fraction of the peak."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the decay after the warmup."""
    warmup_updates: int = 0
    """Update t < warmup_updates uses (t + 1) / warmup_updates of the peak."""
    total_updates: int | None = None
    """The update at which linear and cosine end. If absent, they end with the run."""
    final_fraction: float = 0.0
    """Fraction of the peak at which linear and cosine end. Later updates keep this value."""

    def __post_init__(self) -> None:
        if self.warmup_updates < 0:
            raise InvalidValueError(f"scheduler_cfg.warmup_updates must be >= 0, got {self.warmup_updates}")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise InvalidValueError(f"scheduler_cfg.final_fraction must lie in [0, 1], got {self.final_fraction}")
        if self.total_updates is not None and self.total_updates <= self.warmup_updates:
            raise InvalidValueError(
                f"scheduler_cfg.total_updates={self.total_updates} must exceed warmup_updates={self.warmup_updates}"
            )

    def factor(self, update: int, run_updates: int | None) -> float:
        """The fraction of the peak at `update`, counted from 0, in a run of `run_updates` updates."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        if self.type == "constant":
            return 1.0
        total = run_updates if self.total_updates is None else self.total_updates
        assert total is not None, "check() must be called first"
        done = min((update - self.warmup_updates) / max(total - self.warmup_updates, 1), 1.0)
        left = 1.0 - done if self.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_fraction + (1.0 - self.final_fraction) * left

    def check(self, run_updates: int | None) -> None:
        """Raises ConfigError if linear or cosine has no last update."""
        if self.type != "constant" and self.total_updates is None and run_updates is None:
            raise ConfigError(
                f"scheduler_cfg.type={self.type} needs a last update, and the run has no fixed number of updates. "
                "Set scheduler_cfg.total_updates, or use type: constant"
            )


@dataclass(frozen=True)
class UpdateStats:
    """The result of one call of `step`."""

    grad_norm: float
    """Norm of the policy's gradient before clipping."""
    lr: float
    """Learning rate of the policy in this update."""
    skipped: bool
    """True if the loss or a gradient was not finite. The weights and the optimizer state are then unchanged."""
    skipped_in_a_row: int
    """Number of consecutive skipped updates, including this one. 0 after an update that was applied."""
    culprit: str = ""
    """If skipped: the name of the first parameter whose gradient is not finite, or `loss`."""
    value_grad_norm: float | None = None
    """Norm of the value head's gradient before clipping. None if there is no value head."""


BuildHead = Callable[[int, int], nn.Module]
"""Builds a new value head from (width, seed), as `stage.build_value_head` does."""

Offloadable = Literal["policy", "optimizer"]
"""`policy` is the trained module, the value head and the snapshots. `optimizer` is the optimizer state."""


class Kept(Protocol):
    """State of one rank that a backend saves beside its own, such as a replay store."""

    def state(self) -> Mapping[str, Tensor]:
        """The tensors to save, by name. They may be views of tensors that change later."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned on this rank. Raises ResumeError if it does not fit."""


class TrainBackend(ABC):
    """Owns the trainable weights of one bundle: updates, snapshots, gathers, offloads and saves them."""

    module: nn.Module
    """The trained module. It is always in eval mode."""
    device: torch.device
    """The device to which rows must be moved before training."""
    trainable: Mapping[str, nn.Parameter]
    """Trainable parameters by their names in `module`."""
    updates: int
    """Number of optimizer updates done."""
    seed: int
    """The seed of the run."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`. `last` is True for the last call before `step`."""

    @abstractmethod
    def step(self, max_grad_norm: float, loss: Tensor) -> UpdateStats:
        """Clip the gradient, update the weights, and update the snapshots that follow each optimizer update.

        If `loss` or the gradient is not finite, the update is skipped instead: the gradient is dropped and the weights
        stay as they are.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradient that was added since the last `step`. The last call of `backward` had `last=True`."""

    @abstractmethod
    def set_gradient_aside(self) -> float:
        """Set aside the gradient that was added since the last `step`, and return its norm.

        The last call of `backward` had `last=True`. The gradient waits for `join_gradients`. This is a collective.
        """

    @abstractmethod
    def join_gradients(self, factors: Sequence[float]) -> None:
        """Make the gradient the sum of those that were set aside, each times its factor, in the order of the calls."""

    @abstractmethod
    def provide_value_head(self, build: BuildHead) -> nn.Module:
        """Return the value head. The first call builds it, and it is then trained and saved beside the policy.

        The head is not part of `module` or `trainable`: snapshots do not copy it, and it is never gathered, sent to an
        engine or exported.
        """

    @abstractmethod
    def keep(self, name: str, kept: Kept) -> None:
        """Save the state of `kept` with every checkpoint from now on, and restore it with `load`."""

    @abstractmethod
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite trained parameters, by name, by whole values, which are equal on all ranks.

        Names that nothing has here are left out, such as those of a value head that the loss does not need.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """Update the snapshots that change once per training step. Called at the end of each step."""

    @abstractmethod
    def weights(self, name: str) -> AbstractContextManager[None]:
        """Run the block with the weights of snapshot `name`. Raises RuntimeError if gradients are enabled."""

    @abstractmethod
    def sampling(self, gather: bool = True) -> AbstractContextManager[None]:
        """Run the block without gradients. Ranks may run unequal numbers of forward passes inside.

        Args:
            gather: True gathers the whole weights once, so that forward passes contain no collective. False keeps them
                sharded, and each forward pass gathers one block at a time, in step with those of the other ranks.
        """

    @broadcast
    @abstractmethod
    def snapshot(self, name: str) -> None:
        """Keep a copy of the live weights as `name`."""

    @abstractmethod
    def has_snapshot(self, name: str) -> bool:
        """True if a snapshot `name` exists."""

    @broadcast
    def version(self) -> int:
        """The version of the weights, which is the number of optimizer updates done."""
        return self.updates

    @broadcast
    @abstractmethod
    def gather(self, name: str = "live") -> Mapping[str, Tensor]:
        """Whole trainable tensors on the CPU by parameter name: of the live weights or of a snapshot."""

    @abstractmethod
    def adapter_spec(self) -> LoraSpec | None:
        """Rank, alpha and targets of the trained adapters. None if all weights are trained."""

    @abstractmethod
    def named_tensors(self, payload: Payload, weights: str = "live") -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the device, one at a time in a fixed order: of the live weights or of a snapshot.

        `adapter` and `full` yield the trainable parameters under their own names. `merged` yields W + scale B A in
        float32 for each adapted layer, under the layer's name without adapter parts. With sharding, every item is a
        collective, so every rank must iterate to the end.
        """

    @rank0
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """Approximate number of bytes that `save` writes."""

    @broadcast
    @abstractmethod
    def nonfinite(self) -> tuple[NonFinite, ...]:
        """The tensors that `save` would write with NaN or infinite elements, the same on all ranks. A collective."""

    @broadcast
    @abstractmethod
    def save(self, directory: str, in_background: bool = False) -> None:
        """Write the state that training changes: trainable weights, optimizer, snapshots and counters.

        Args:
            in_background: return when the state is copied to main memory. Every file that is written later gets a
                receipt when it is whole (unirl/train/backend/manifest.py), and `finish_save` reports failures. At most
                one such save is under way: the next one waits for it.
        """

    @broadcast
    @abstractmethod
    def finish_save(self, wait: bool) -> None:
        """Raise the exception of a save in the background that failed.

        Args:
            wait: wait for the end of a save that is under way. False: return at once.
        """

    @broadcast
    @abstractmethod
    def load(self, directory: str) -> None:
        """Restore what `save` wrote, bit for bit. Raises CheckpointError if it is damaged or of another model."""

    @broadcast
    @abstractmethod
    def load_policy(self, directory: str) -> None:
        """Restore only the weights and snapshots that `save` wrote, for evaluation and export."""

    @broadcast
    @abstractmethod
    def offload(self, names: Sequence[Offloadable]) -> None:
        """Move the named parts to main memory."""

    @broadcast
    @abstractmethod
    def onload(self, names: Sequence[Offloadable]) -> None:
        """Move the named parts back to the device."""
