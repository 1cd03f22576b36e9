"""The train backend over plain PyTorch: whole weights on one rank, FSDP2 shards on several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.config.errors import ConfigError
from unirl.distributed import current
from unirl.distributed.weight_sync.base import Payload
from unirl.models.lora import ADAPTER, LoraSpec, choose_targets, inject_lora
from unirl.models.saved import SavedWeights
from unirl.train.backend import deferred, state
from unirl.train.backend.adamw import adamw
from unirl.train.backend.base import (
    LrSchedulerConfig,
    Offloadable,
    OptimizerConfig,
    TrainBackend,
    UpdateStats,
)
from unirl.train.backend.offload import move_module, move_optimizer
from unirl.train.backend.sharding import Sharding, clip, sharding_of
from unirl.train.backend.snapshots import LIVE, Snapshots
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, FSDPConfig, LoraConfig, SnapshotRule, TrainTopology
from unirl.types.protocols import TORCH_DTYPES, ModelFacts


class Trained(Protocol):
    """What the backend asks of a bundle."""

    facts: ModelFacts

    def trainable(self) -> nn.Module:
        """The module whose parameters with `requires_grad` are trained, in place."""
        ...


class Deferrable(Trained, Protocol):
    """A bundle whose trained module may be on the meta device."""

    device: torch.device

    def saved(self) -> SavedWeights:
        """The trained module's weights, row by row."""
        ...


class FSDPBackend(TrainBackend):
    """Trains adapters or all weights of one module by AdamW. The module stays in eval mode."""

    toy: ClassVar[Mapping[str, object]] = {"fsdp_cfg.reduce_dtype": "fp64"}

    def __init__(
        self,
        bundle: Trained,
        seed: int = 0,
        run_updates: int | None = None,
        *,
        optimizer_cfg: OptimizerConfig,
        scheduler_cfg: LrSchedulerConfig | None = None,
        fsdp_cfg: FSDPConfig | None = None,
        lora_cfg: LoraConfig | None = None,
        ema_cfg: EmaFullConfig | None = None,
        ema_lora_cfg: EmaLoraConfig | None = None,
        topology: TrainTopology | None = None,
    ) -> None:
        """
        Args:
            seed: the run's; adapters start as a pure function of it.
            run_updates: optimizer updates of the whole run, where schedules end.
            lora_cfg: absent = all weights are trained.
        """
        self.rank = current()
        config = fsdp_cfg or FSDPConfig()
        config.check_ranks(self.rank.dp_size)
        (topology or TrainTopology()).check_ranks(self.rank.dp_size)
        self.schedule = scheduler_cfg or LrSchedulerConfig()
        self.schedule.check(run_updates)
        self.run_updates = run_updates
        self.optimizer_cfg = optimizer_cfg
        self.lora = lora_cfg
        self.updates = 0
        self.skipped_in_a_row = 0
        self.is_gathered = False
        self.sharding = sharding_of(config, self.rank)
        self.module = bundle.trainable().eval()
        self.adapter = add_adapters(self.module, lora_cfg, bundle.facts, seed)
        lay_out(self.module, bundle, config, self.sharding)
        if deferred.is_deferred(self.module):
            load_deferred(self.module, self.sharding, cast(Deferrable, bundle), self.adapter, seed)
        self.sharding.adopt(self.module)
        self.home = next(self.module.parameters()).device
        self.trainable = self.sharding.trainable
        if not self.trainable:
            raise ConfigError(f"{type(self.module).__name__} has no trainable parameter: unfreeze it or set lora_cfg")
        self.shards = self.sharding.shards
        self.optimizer = adamw(self.shards.values(), optimizer_cfg, exact=config.reduce_dtype == "fp64")
        self.rules: tuple[SnapshotRule, ...] = tuple(rule for rule in (ema_cfg, ema_lora_cfg) if rule is not None)
        self.snapshots = Snapshots(self.shards)
        for rule in self.rules:
            self.snapshots.take(rule.snapshot)

    @property
    def device(self) -> torch.device:
        return self.home

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.optimizer_cfg.learning_rate * self.schedule.factor(self.updates, self.run_updates)

    # Updates

    def backward(self, loss: Tensor, last: bool) -> None:
        self.sharding.backward(loss, last)

    def step(self, max_grad_norm: float, loss: Tensor) -> UpdateStats:
        lr = self.learning_rate()
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        norm = self.sharding.squared_norm(gradients).sqrt().float()
        norm_value, loss_value = torch.stack(
            [norm, self.sharding.sum_over_ranks(loss).float().to(norm.device)]
        ).tolist()
        if not (math.isfinite(norm_value) and math.isfinite(loss_value)):
            return self._skip(norm_value, lr)
        if norm_value > max_grad_norm:
            clip(self.shards, norm, max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.sharding.reshard()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average("update", self.updates)
        self.updates += 1
        self.skipped_in_a_row = 0
        return UpdateStats(norm_value, lr, skipped=False, skipped_in_a_row=0)

    def _skip(self, norm: float, lr: float) -> UpdateStats:
        """Every rank comes here or none, since all saw the same norm and loss."""
        names = list(self.shards)
        gradients = [self.shards[name].grad for name in names]
        bad = [i for i, grad in enumerate(gradients) if grad is not None and not grad.isfinite().all()]
        first = self.sharding.first_of_ranks(bad[0] if bad else len(names))
        culprit = names[first] if first < len(names) else "loss"
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row += 1
        return UpdateStats(norm, lr, skipped=True, skipped_in_a_row=self.skipped_in_a_row, culprit=culprit)

    def finish_step(self) -> None:
        self._average("step", self.updates)

    def _average(self, timing: str, now: int) -> None:
        for rule in self.rules:
            if rule.timing == timing and rule.due(now):
                self.snapshots.average(rule.snapshot, rule.decay_at(now))

    # Weights

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        if self.is_gathered:
            raise RuntimeError(f"weights({name!r}) inside sampling(): the gathered weights would stay the live ones")
        # Before and after: a module that is gathered would run on without a look at the shards.
        self.sharding.reshard()
        with self.snapshots.swapped_in(name):
            try:
                yield
            finally:
                self.sharding.reshard()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        self.is_gathered = True
        try:
            with torch.no_grad(), self.sharding.gathered():
                yield
        finally:
            self.is_gathered = False

    @property
    def snapshot_names(self) -> tuple[str, ...]:
        return tuple(self.snapshots.stored)

    def snapshot(self, name: str) -> None:
        self.snapshots.take(name)

    def gather(self, name: str = LIVE) -> Mapping[str, Tensor]:
        return {key: tensor.cpu().clone() for key, tensor in self._whole_tensors(name)}

    def adapter_spec(self) -> LoraSpec | None:
        return self.adapter

    def named_tensors(self, payload: Payload, weights: str = LIVE) -> Iterator[tuple[str, Tensor]]:
        if (payload == "full") == (self.adapter is not None):
            trained = "all weights are" if self.adapter is None else "an adapter is"
            raise ConfigError(f"the payload {payload!r} does not exist where {trained} trained", code=2020)
        return self._merged_tensors(weights) if payload == "merged" else self._whole_tensors(weights)

    def _whole_tensors(self, weights: str) -> Iterator[tuple[str, Tensor]]:
        values = self._shards_of(weights)
        for name, parameter in self.trainable.items():
            yield name, self.sharding.whole(parameter, values[name])

    def _merged_tensors(self, weights: str) -> Iterator[tuple[str, Tensor]]:
        """Base name and W + scale B A in float32, of every adapted layer."""
        assert self.adapter is not None
        values = self._shards_of(weights)
        for name in [name for name in self.trainable if ".lora_A." in name]:
            layer = name.removesuffix(f".lora_A.{ADAPTER}.weight")
            a, b = (f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB")
            product = self._whole(b, values[b]) @ self._whole(a, values[a])
            base = self.sharding.whole(self.sharding.parameters[f"{layer}.base_layer.weight"])
            yield f"{layer}.weight", base.float() + self.adapter.scale * product

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        return self.sharding.whole(self.trainable[name], shard)

    def _shards_of(self, weights: str) -> Mapping[str, Tensor]:
        if weights == LIVE:
            return {name: shard.detach() for name, shard in self.shards.items()}
        self.snapshots.require(weights)
        return self.snapshots.stored[weights]

    # State

    def checkpoint_bytes(self) -> int:
        copies = 3 + len(self.snapshots.stored)  # weights and AdamW's two moments, and the snapshots
        return copies * sum(p.numel() * p.element_size() for p in self.trainable.values())

    def save(self, directory: str) -> None:
        assert self.snapshots.in_force == LIVE, "a checkpoint inside weights(...) would save a snapshot as live weights"
        moments = state.optimizer_tensors(self.optimizer, self.shards)
        tensors: dict[str, state.Tensors] = {
            "weights": self._laid_out(self.shards),
            "optimizer": self._laid_out(moments),
            "snapshots": self._laid_out(self._snapshot_tensors()),
        }
        state.write(Path(directory), tensors, self._counters(), self.rank)

    def load(self, directory: str) -> None:
        path = Path(directory)
        counters = state.read_counters(path)
        state.check_trained_weights(counters, self.lora)
        state.check_snapshots(counters, sorted(self.snapshots.stored))
        saved = state.open_tensors(path, counters.files, self.rank)
        found, snapshots = saved.headers, self._snapshot_tensors()
        state.check_match("weights", found["weights"], self.trainable)
        state.check_match("snapshots", found["snapshots"], self._laid_out(snapshots))
        state.check_optimizer(found["optimizer"], self.trainable)
        # Into fresh tensors first: a file that breaks off changes nothing.
        fresh = {name: torch.empty_like(tensor) for name, tensor in {**self.shards, **snapshots}.items()}
        moments = self._empty_moments(found["optimizer"])
        saved.read(self._laid_out(fresh | moments))
        self.sharding.reshard()
        with torch.no_grad():
            for name, tensor in {**self.shards, **snapshots}.items():
                tensor.copy_(fresh[name])
        state.load_optimizer(self.optimizer, moments, self.shards)
        self.updates, self.skipped_in_a_row = counters.updates, counters.skipped_in_a_row

    def _empty_moments(self, found: state.Tensors) -> state.Tensors:
        moments = {}
        for name in state.owners(found, self.trainable):
            for key in state.MOMENTS:
                like = torch.zeros(()) if key == "step" else self.shards[name].detach()
                moments[f"{name}.{key}"] = torch.empty_like(like)
        return moments

    def _laid_out(self, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """Tensors of the state as parts of wholes, by the parameter that their name is made of."""
        return {name: self._laid_out_one(name, shard.detach()) for name, shard in shards.items()}

    def _laid_out_one(self, name: str, shard: Tensor) -> Any:
        key = name.rpartition(":")[2]
        if key.endswith(".step") and key not in self.trainable:
            return shard
        owner = key if key in self.trainable else key.rpartition(".")[0]
        return self.sharding.laid_out(self.trainable[owner], shard)

    def _snapshot_tensors(self) -> dict[str, Tensor]:
        return {f"{s}:{key}": tensor for s, held in self.snapshots.stored.items() for key, tensor in held.items()}

    def _counters(self) -> state.Counters:
        names = tuple(sorted(self.snapshots.stored))
        return state.Counters(
            self.updates, self.skipped_in_a_row, adapter=state.trained_weights(self.lora), snapshots=names
        )

    # Residency

    def offload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, torch.device("cpu"))
        current().free_unused()

    def onload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, self.home)

    def _move(self, names: Sequence[Offloadable], device: torch.device) -> None:
        for name in names:
            if name == "policy":
                move_module(self.module, device)
                self.sharding.moved()
                self.snapshots.to(device)
            else:
                move_optimizer(self.optimizer, device)


def add_adapters(module: nn.Module, lora: LoraConfig | None, facts: ModelFacts, seed: int) -> LoraSpec | None:
    """Inject the adapters that `lora` asks for; what was injected."""
    refuse_dropout(module)
    if lora is None:
        return None
    spec = LoraSpec(lora.rank, lora.alpha, choose_targets(module, lora.target_modules, facts.lora_targets))
    inject_lora(module, spec, seed)
    return spec


def lay_out(module: nn.Module, bundle: Trained, config: FSDPConfig, sharding: Sharding) -> None:
    """Storage dtypes, checkpointed and compiled blocks, shards; in place."""
    compute_dtype = next(module.parameters()).dtype
    set_dtypes(module, config)
    blocks = [m for m in module.modules() if type(m).__name__ in bundle.facts.block_class_names]
    if (config.activation_checkpointing or config.use_torch_compile) and not blocks:
        raise ConfigError(
            f"{type(module).__name__} holds no block of {list(bundle.facts.block_class_names)} to checkpoint or compile"
        )
    for block in blocks:
        if config.use_torch_compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Around the compiled forward: the compiler does not look into a checkpoint that it meets first.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    sharding.wrap(module, blocks, compute_dtype)


def load_deferred(
    module: nn.Module, sharding: Sharding, bundle: Deferrable, adapter: LoraSpec | None, seed: int
) -> None:
    """Storage and values for a module that was built without."""
    persistent = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
    deferred.give_storage(module, bundle.device)
    sharding.adopt(module)
    deferred.fill(module, sharding, bundle.saved(), persistent, 0 if adapter is None else adapter.rank, seed)


def refuse_dropout(module: nn.Module) -> None:
    """Raises ConfigError on active dropout: a policy is trained in eval mode, so that ratios compare equal networks."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise ConfigError(
                f"{type(module).__name__}.{name} has dropout {child.p}, which would never act: the policy runs in eval "
                "mode in rollout and training. Set the model's dropout to 0",
                code=2020,
            )


def set_dtypes(module: nn.Module, config: FSDPConfig) -> None:
    """Trainable weights to float32 masters, frozen ones to `param_dtype`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif config.param_dtype is not None:
            parameter.data = parameter.data.to(TORCH_DTYPES[config.param_dtype])
