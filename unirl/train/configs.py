"""The training settings that recipes write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from unirl.config.errors import GeometryError, IncompatibleError, InvalidValueError
from unirl.types.protocols import DtypeName


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """How the trained module is stored, run and, on several ranks, sharded. Trainable weights are float32 masters."""

    param_dtype: DtypeName | None = None
    """Storage of the frozen weights of the trained module; absent = as the bundle loaded them."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, one more forward."""
    use_torch_compile: bool = False
    """Compile each block."""
    shard_size: int | None = None
    """Ranks that share one copy of the weights; others hold further copies. Absent = all ranks; 1 = whole copies."""
    fsdp_mode: Literal["full", "hybrid"] | None = None
    """full = shard over all ranks; hybrid = copies of shard_size ranks each (HSDP). Absent = as shard_size implies."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again in the backward pass."""
    mixed_precision: bool = True
    """Gather float32 masters in the dtype that the bundle was loaded in. No effect on one rank, or for fp32."""
    defer_grad_sync: bool = True
    """Reduce gradients over ranks once an update; false: after each part, where unsharded gradients do not fit."""
    reduce_dtype: Literal["fp32", "fp64"] = "fp32"
    """Gradients add up over micro-batches and ranks in this; fp64 gives the same bits for any number of ranks."""

    def __post_init__(self) -> None:
        if self.shard_size is not None and self.shard_size < 1:
            raise InvalidValueError(f"fsdp_cfg.shard_size must be >= 1, got {self.shard_size}")
        if self.fsdp_mode == "full" and self.shard_size is not None:
            raise IncompatibleError(
                f"fsdp_cfg.fsdp_mode=full shards over all ranks, and shard_size={self.shard_size} says otherwise. "
                "Remove one of them, or set fsdp_mode: hybrid"
            )
        if self.fsdp_mode == "hybrid" and self.shard_size is None:
            raise IncompatibleError(
                "fsdp_cfg.fsdp_mode=hybrid keeps a copy of the weights in every group of shard_size ranks, and "
                "shard_size is not set. Set fsdp_cfg.shard_size to the devices of one node, such as 8"
            )
        if self.reduce_dtype == "fp64" and not self.defer_grad_sync:
            raise IncompatibleError(
                "fsdp_cfg.defer_grad_sync=false rounds the gradient after each part, which reduce_dtype=fp64 is to "
                "avoid. Use reduce_dtype: fp32, or defer_grad_sync: true"
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError if `num_ranks` ranks cannot hold copies of this size."""
        if num_ranks % (self.shard_size or 1):
            legal = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
            raise GeometryError(
                f"fsdp_cfg.shard_size={self.shard_size} does not divide the {num_ranks} ranks that train. "
                f"Use one of {', '.join(map(str, legal))}"
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen base. There is no dropout: it would make ratios differ from 1 on equal weights."""

    rank: int = 32
    """Bottleneck width r (LoRA, arXiv:2106.09685)."""
    alpha: float = 64.0
    """Scale; the update is alpha / rank * B A."""
    target_modules: tuple[str, ...] | Literal["model"] = "model"
    """Module name suffixes; the word "model" takes the model's own list (ModelFacts.lora_targets)."""

    toy: ClassVar[Mapping[str, object]] = {"rank": 4, "alpha": 8.0}

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidValueError(f"lora_cfg.rank must be >= 1, got {self.rank}")
        if self.alpha <= 0:
            raise InvalidValueError(f"lora_cfg.alpha must be > 0, got {self.alpha}")


@dataclass(frozen=True, kw_only=True)
class EmaFullConfig:
    """Snapshot `ema`: an average of the trainable weights (adapters or all) for evaluation and checkpoints.

    shadow <- d shadow + (1 - d) live after update t = every - 1, 2 every - 1, ... (t from 0), with
    d = min((1 + t) / (10 + t), target_decay): Flow-GRPO's evaluation EMA.
    """

    target_decay: float = 0.9
    every: int = 8
    """Updates between two averagings."""

    snapshot: ClassVar[str] = "ema"
    timing: ClassVar[Literal["update", "step"]] = "update"

    def __post_init__(self) -> None:
        _check_fraction("ema_cfg.target_decay", self.target_decay)
        if self.every < 1:
            raise InvalidValueError(f"ema_cfg.every must be >= 1, got {self.every}")

    def decay_at(self, t: int) -> float:
        """The decay after update t, counted from 0."""
        return min((1 + t) / (10 + t), self.target_decay)

    def due(self, t: int) -> bool:
        """Whether the average moves after update t."""
        return (t + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class EmaLoraConfig:
    """Snapshot `old`: the behaviour policy of DiffusionNFT (arXiv:2509.16117), moved once at the end of a step.

    old <- d old + (1 - d) live, d = min(rate * max(n - flat_updates, 0), ceiling), n = updates done.
    The paper's type 0 is ceiling=0 (old = live); type 1 the defaults; type 2 is 75, 0.0075, 0.999.
    """

    flat_updates: int = 0
    rate: float = 0.001
    ceiling: float = 0.5

    snapshot: ClassVar[str] = "old"
    timing: ClassVar[Literal["update", "step"]] = "step"

    def __post_init__(self) -> None:
        _check_fraction("ema_lora_cfg.ceiling", self.ceiling)
        if self.rate < 0 or self.flat_updates < 0:
            raise InvalidValueError(
                f"ema_lora_cfg.rate and flat_updates must be >= 0, got {self.rate} and {self.flat_updates}"
            )

    def decay_at(self, n: int) -> float:
        """The decay when `n` updates are done."""
        return min(self.rate * max(n - self.flat_updates, 0), self.ceiling)

    def due(self, n: int) -> bool:
        """Every step."""
        return True


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """A weight snapshot that is loaded from another checkpoint of the trained model's architecture; it never changes.

    Where all weights are trained it costs one copy of them; where adapters are, one copy of the whole module.
    """

    path: str
    """What `bundle.path` takes: a hub id, or the directory of a model, such as one that `unirl export` wrote."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """The value head that a loss with a critic trains beside the policy, by AdamW in a parameter group of its own.

    Betas and epsilon are those of optimizer_cfg. The learning rate is constant: while the policy's warms up, the head
    already learns.
    """

    learning_rate: float = 1e-3
    """Per update."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The head's gradient is clipped by its own norm, the policy's by stack.max_grad_norm."""
    width: int = 64
    """Channels of its layers."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            if vars(self)[name] <= 0:
                raise InvalidValueError(f"value_cfg.{name} must be > 0, got {vars(self)[name]}")
        if self.weight_decay < 0:
            raise InvalidValueError(f"value_cfg.weight_decay must be >= 0, got {self.weight_decay}")
        if self.width < 1:
            raise InvalidValueError(f"value_cfg.width must be >= 1, got {self.width}")


SnapshotRule = EmaFullConfig | EmaLoraConfig


@dataclass(frozen=True, kw_only=True)
class TrainTopology:
    """How many devices share one copy of the work, by kind. Only data parallelism (dp) is built."""

    dp: int | None = None
    """Ranks with distinct rows; absent = all that train."""
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise InvalidValueError(f"topology.dp must be >= 1, got {self.dp}")
        for name, size in asdict(self).items():
            if name != "dp" and size != 1:
                raise IncompatibleError(
                    f"topology.{name}={size} is not available: only dp may differ from 1. Write {name}: 1"
                )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError if `num_ranks` ranks are not what this says."""
        if self.dp not in (None, num_ranks):
            raise GeometryError(
                f"topology.dp={self.dp}, but {num_ranks} ranks train. Leave topology.dp out, or write dp: {num_ranks}"
            )


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidValueError(f"{name} must lie in [0, 1), got {value}")
