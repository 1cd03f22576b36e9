"""The training settings that recipes write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from unirl.config.errors import GeometryError, IncompatibleError, InvalidValueError
from unirl.types.protocols import DtypeName


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Settings for storing, running and sharding the trained module. Trainable weights are float32 master weights."""

    param_dtype: DtypeName | None = None
    """Storage dtype of the frozen weights of the trained module. If absent, they stay as the bundle loaded them."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass. This saves memory and costs one more forward pass."""
    use_torch_compile: bool = False
    """Compile each block."""
    shard_size: int | None = None
    """Number of ranks that share one copy of the weights; the other ranks hold further copies.

    If absent, all ranks share one copy. With 1, every rank holds a whole copy.
    """
    fsdp_mode: Literal["full", "hybrid"] | None = None
    """full = shard over all ranks; hybrid = copies of shard_size ranks each (HSDP). If absent, shard_size decides."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again in the backward pass."""
    prefetch_blocks: int = 0
    """Number of blocks that are gathered ahead of the one that runs, in forward and backward passes.

    With 0, FSDP2 gathers a block when the host reaches it, and in backward passes one block ahead.
    """
    mixed_precision: bool = True
    """Gather the float32 master weights in the dtype that the bundle was loaded in.

    Weights that their class keeps in float32 are gathered in float32, and so are the adapters of such a model. This has
    no effect on one rank, or if the bundle was loaded in fp32.
    """
    defer_grad_sync: bool = True
    """Reduce gradients over the ranks once per update.

    If false, they are reduced after each part. Use this where unsharded gradients do not fit in memory.
    """
    reduce_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype in which gradients are added up over micro-batches and ranks.

    With fp64 the result has the same bits for any number of ranks, if micro-batches hold the same rows.
    """

    def __post_init__(self) -> None:
        if self.shard_size is not None and self.shard_size < 1:
            raise InvalidValueError(f"fsdp_cfg.shard_size must be >= 1, got {self.shard_size}")
        if self.prefetch_blocks < 0:
            raise InvalidValueError(f"fsdp_cfg.prefetch_blocks must be >= 0, got {self.prefetch_blocks}")
        if self.fsdp_mode == "full" and self.shard_size is not None:
            raise IncompatibleError(
                f"fsdp_cfg.fsdp_mode=full shards over all ranks, and shard_size={self.shard_size} contradicts it. "
                "Remove one of them, or set fsdp_mode: hybrid"
            )
        if self.fsdp_mode == "hybrid" and self.shard_size is None:
            raise IncompatibleError(
                "fsdp_cfg.fsdp_mode=hybrid keeps a copy of the weights in every group of shard_size ranks, but "
                "shard_size is not set. Set fsdp_cfg.shard_size to the number of devices of one node, such as 8"
            )
        if self.reduce_dtype == "fp64" and not self.defer_grad_sync:
            raise IncompatibleError(
                "fsdp_cfg.defer_grad_sync=false rounds the gradient after each part, but reduce_dtype=fp64 exists to "
                "round it only once. Use reduce_dtype: fp32, or defer_grad_sync: true"
            )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError unless `num_ranks` is a multiple of `shard_size`."""
        if num_ranks % (self.shard_size or 1):
            legal = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
            raise GeometryError(
                f"fsdp_cfg.shard_size={self.shard_size} does not divide the {num_ranks} ranks that train. "
                f"Use one of {', '.join(map(str, legal))}"
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on frozen base weights.

    There is no adapter dropout, because importance ratios would then differ from 1 on equal weights.
    """

    rank: int = 32
    """Bottleneck width r (LoRA, arXiv:2106.09685)."""
    alpha: float = 64.0
    """Scale; the update is alpha / rank * B A."""
    target_modules: tuple[str, ...] | Literal["model"] = "model"
    """Name suffixes of the adapted modules. The word "model" selects the model's own list (ModelFacts.lora_targets)."""

    path: str | None = None
    """A LoRA file, or the folder of one, with which the adapters start; absent = they start without an update.

    It may be a file of diffusers, PEFT, kohya or ComfyUI. Its rank may be smaller than `rank`, and its alpha another.
    """

    toy: ClassVar[Mapping[str, object]] = {"rank": 4, "alpha": 8.0, "path": None}

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidValueError(f"lora_cfg.rank must be >= 1, got {self.rank}")
        if self.alpha <= 0:
            raise InvalidValueError(f"lora_cfg.alpha must be > 0, got {self.alpha}")


@dataclass(frozen=True, kw_only=True)
class EmaFullConfig:
    """Snapshot `ema`: an average of the trainable weights (adapters or all) for evaluation and checkpoints.

    This is Flow-GRPO's evaluation EMA. Updates t are counted from 0. After update t = every - 1, 2 every - 1, ...

        shadow <- d shadow + (1 - d) live,  d = min((1 + t) / (10 + t), target_decay)
    """

    target_decay: float = 0.9
    """Largest d."""
    every: int = 8
    """The average is updated after every so many optimizer updates."""

    snapshot: ClassVar[str] = "ema"
    timing: ClassVar[Literal["update", "step"]] = "update"

    def __post_init__(self) -> None:
        _check_fraction("ema_cfg.target_decay", self.target_decay)
        if self.every < 1:
            raise InvalidValueError(f"ema_cfg.every must be >= 1, got {self.every}")

    def decay_at(self, t: int) -> float:
        """The decay after update `t`, which is counted from 0."""
        return min((1 + t) / (10 + t), self.target_decay)

    def due(self, t: int) -> bool:
        """True if the average is updated after update `t`."""
        return (t + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class EmaLoraConfig:
    """Snapshot `old`: the behaviour policy of DiffusionNFT (arXiv:2509.16117), updated once at the end of each step.

        old <- d old + (1 - d) live,  d = min(rate * max(n - flat_updates, 0), ceiling),  n = updates done

    The paper's schedule of type 0 is ceiling=0 (old = live), type 1 is the defaults, and type 2 is flat_updates=75,
    rate=0.0075, ceiling=0.999.
    """

    flat_updates: int = 0
    """Number of updates at the start during which d = 0, so that old = live."""
    rate: float = 0.001
    """Growth of d per update."""
    ceiling: float = 0.5
    """Largest d."""

    snapshot: ClassVar[str] = "old"
    timing: ClassVar[Literal["update", "step"]] = "step"

    def __post_init__(self) -> None:
        _check_fraction("ema_lora_cfg.ceiling", self.ceiling)
        if self.rate < 0 or self.flat_updates < 0:
            raise InvalidValueError(
                f"ema_lora_cfg.rate and flat_updates must be >= 0, got {self.rate} and {self.flat_updates}"
            )

    def decay_at(self, n: int) -> float:
        """The decay after `n` updates."""
        return min(self.rate * max(n - self.flat_updates, 0), self.ceiling)

    def due(self, n: int) -> bool:
        """True: the snapshot is updated at the end of every step."""
        return True


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """A weight snapshot that is loaded from another checkpoint of the trained model's architecture and never changes.

    It takes the memory of one copy of the whole module, both with adapters and when all weights are trained.
    """

    path: str
    """A hub id or the directory of a model, as in `bundle.path`. `unirl export` writes such directories."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    toy: ClassVar[Mapping[str, object]] = {"path": "toy", "revision": None}


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """Settings of the value head that a loss with a critic trains beside the policy.

    AdamW trains the head in its own parameter group, with the betas and epsilon of optimizer_cfg. The head's learning
    rate is constant, so it learns at full rate while the learning rate of the policy warms up.
    """

    learning_rate: float = 1e-3
    """Learning rate per update."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """The head's gradient is clipped to this norm. The policy's gradient is clipped to stack.max_grad_norm."""
    width: int = 64
    """Number of channels of its layers."""

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
    """Number of devices per kind of parallelism. Only data parallelism (dp) is available."""

    dp: int | None = None
    """Number of ranks that train on different rows. If absent, all ranks of the train role."""
    tp: int = 1
    """Tensor parallelism; must be 1."""
    pp: int = 1
    """Pipeline parallelism; must be 1."""
    sp: int = 1
    """Sequence parallelism; must be 1."""
    ep: int = 1
    """Expert parallelism; must be 1."""
    cp: int = 1
    """Context parallelism; must be 1."""

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise InvalidValueError(f"topology.dp must be >= 1, got {self.dp}")
        for name, size in asdict(self).items():
            if name != "dp" and size != 1:
                raise IncompatibleError(
                    f"topology.{name}={size} is not available: only dp may differ from 1. Write topology.{name}: 1"
                )

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError unless `dp` is absent or equal to `num_ranks`."""
        if self.dp not in (None, num_ranks):
            raise GeometryError(
                f"topology.dp={self.dp}, but {num_ranks} ranks train. Leave topology.dp out, or write dp: {num_ranks}"
            )


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidValueError(f"{name} must lie in [0, 1), got {value}")
