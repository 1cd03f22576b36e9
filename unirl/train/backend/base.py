"""The contract of a train backend: trainable weights, optimizer steps, named snapshots and checkpoints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unirl.config.errors import ConfigError, InvalidValueError
from unirl.distributed.group.dispatch import broadcast, rank0
from unirl.distributed.weight_sync.base import Payload
from unirl.models.loading.lora import LoraSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101)."""

    learning_rate: float
    """Per update."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0

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
    """The learning rate over updates: a ramp from 0, then constant, or down to a fraction of the peak."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    """Update t < warmup_updates has (t + 1) / warmup_updates of the peak."""
    total_updates: int | None = None
    """Where linear and cosine end; absent = the run's own number of updates."""
    final_fraction: float = 0.0
    """The end of linear and cosine, as a fraction of the peak; held from there on."""

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
        """The fraction of the peak at `update` (from 0), in a run of `run_updates`."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        if self.type == "constant":
            return 1.0
        total = run_updates if self.total_updates is None else self.total_updates
        assert total is not None, "check() comes first"
        done = min((update - self.warmup_updates) / max(total - self.warmup_updates, 1), 1.0)
        left = 1.0 - done if self.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_fraction + (1.0 - self.final_fraction) * left

    def check(self, run_updates: int | None) -> None:
        """Raises ConfigError if linear or cosine has no end."""
        if self.type != "constant" and self.total_updates is None and run_updates is None:
            raise ConfigError(
                f"scheduler_cfg.type={self.type} needs an end: set scheduler_cfg.total_updates, or use type: constant"
            )


@dataclass(frozen=True)
class UpdateStats:
    """The result of one call of `step`."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """The loss or a gradient was not finite: nothing changed."""
    skipped_in_a_row: int
    culprit: str = ""
    """If skipped: the first parameter whose gradient is not finite, or `loss`."""
    value_grad_norm: float | None = None
    """Of the value head, before clipping; None = there is none."""


BuildHead = Callable[[int, int], nn.Module]
"""A fresh value head of a width, from a seed: `stage.build_value_head`."""

Offloadable = Literal["policy", "optimizer"]
"""`policy`: the trained module with its gradients and snapshots. `optimizer`: its state."""


class TrainBackend(ABC):
    """The trainable weights of one bundle: stepped, snapshotted, gathered, offloaded and saved."""

    module: nn.Module
    """The trained module, always in eval mode."""
    trainable: Mapping[str, nn.Parameter]
    """Trainable parameters by their names in `module`."""
    updates: int
    """Optimizer updates done."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which rows must be for training."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; `last` = this completes the gradient of an update."""

    @abstractmethod
    def step(self, max_grad_norm: float, loss: Tensor) -> UpdateStats:
        """Clip the gradient, update, move what follows updates; or, if `loss` or the gradient is not finite, skip."""

    @abstractmethod
    def provide_value_head(self, build: BuildHead) -> nn.Module:
        """The value head: made by `build` at the first call, and from then on trained and saved beside the policy.

        It is no part of `module` and `trainable`: snapshots do not copy it, and it is never gathered, sent or exported.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """The end of a step of the loop: move the snapshots that follow steps."""

    @abstractmethod
    def weights(self, name: str) -> AbstractContextManager[None]:
        """Run with a snapshot's weights. Raises if gradients are enabled."""

    @abstractmethod
    def sampling(self) -> AbstractContextManager[None]:
        """Run without gradients, weights gathered once, so that ranks may run unequal numbers of forwards."""

    @property
    @abstractmethod
    def snapshot_names(self) -> tuple[str, ...]:
        """The snapshots that exist."""

    @broadcast
    @abstractmethod
    def snapshot(self, name: str) -> None:
        """Keep a copy of the live weights as `name`."""

    def has_snapshot(self, name: str) -> bool:
        """Whether a snapshot `name` exists."""
        return name in self.snapshot_names

    @broadcast
    def version(self) -> int:
        """Optimizer updates done."""
        return self.updates

    @broadcast
    @abstractmethod
    def gather(self, name: str = "live") -> Mapping[str, Tensor]:
        """Full trainable tensors on the CPU by parameter name, live or of a snapshot."""

    @abstractmethod
    def adapter_spec(self) -> LoraSpec | None:
        """The adapters that are trained; None when all weights are."""

    @abstractmethod
    def named_tensors(self, payload: Payload, weights: str = "live") -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on the device, one at a time, in a fixed order: of the live weights or of a snapshot.

        `adapter` and `full` are trainable parameters under their own names; `merged` is W + scale B A in float32 of
        each adapted layer, under the layer's bare name. With sharding every rank must take every item.
        """

    @rank0
    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """About how many bytes `save` writes."""

    @broadcast
    @abstractmethod
    def save(self, directory: str) -> None:
        """Write everything that changes: trainable weights, optimizer, snapshots, counters."""

    @broadcast
    @abstractmethod
    def load(self, directory: str) -> None:
        """Restore what `save` wrote, bit for bit. Raises CheckpointError if it is damaged or does not fit."""

    @broadcast
    @abstractmethod
    def load_policy(self, directory: str) -> None:
        """Restore only the weights and snapshots that `save` wrote, for evaluation and export."""

    @broadcast
    @abstractmethod
    def offload(self, names: Sequence[Offloadable]) -> None:
        """Move to main memory."""

    @broadcast
    @abstractmethod
    def onload(self, names: Sequence[Offloadable]) -> None:
        """Move back to the device."""
