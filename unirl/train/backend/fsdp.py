"""The train backend over plain PyTorch: whole weights on one rank, FSDP2 shards on several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.config.errors import ConfigError, IncompatibleError
from unirl.distributed import current
from unirl.distributed.weight_sync.base import Payload
from unirl.models.loading.lora import ADAPTER, LoraSpec, choose_targets, inject_lora
from unirl.models.loading.saved_weights import SavedWeights
from unirl.train.backend import deferred, state
from unirl.train.backend.adamw import adamw
from unirl.train.backend.base import (
    BuildHead,
    LrSchedulerConfig,
    Offloadable,
    OptimizerConfig,
    TrainBackend,
    UpdateStats,
)
from unirl.train.backend.offload import move_module, move_optimizer
from unirl.train.backend.sharding import Sharding, clip, sharding_of
from unirl.train.backend.snapshots import LIVE, Snapshots
from unirl.train.configs import (
    EmaFullConfig,
    EmaLoraConfig,
    FSDPConfig,
    LoraConfig,
    SnapshotRule,
    TrainTopology,
    ValueConfig,
)
from unirl.types.facts import ModelFacts
from unirl.types.protocols import TORCH_DTYPES

VALUE_HEAD = "value_head"
"""What the names of the value head's parameters begin with."""


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
        value_cfg: ValueConfig | None = None,
        block_class_names: tuple[str, ...] | None = None,
        trainable_attr: str | None = None,
    ) -> None:
        """
        Args:
            seed: the run's; adapters and the value head start as pure functions of it.
            run_updates: optimizer updates of the whole run, where schedules end.
            lora_cfg: absent = all weights are trained.
            value_cfg: how a value head is trained, if the loss needs one.
            block_class_names: classes that are wrapped, checkpointed and compiled one by one. Absent = the model's own
                (ModelFacts.block_class_names).
            trainable_attr: the component that is trained. Absent = the model's own, which is the only legal one.
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
        self.finished_updates = 0
        """Updates done when the last step ended."""
        self.is_gathered = False
        self.sharding = sharding_of(config, self.rank)
        check_component(trainable_attr, bundle.facts)
        self.module = bundle.trainable().eval()
        self.adapter = add_adapters(self.module, lora_cfg, bundle.facts, seed)
        lay_out(self.module, bundle, config, self.sharding, block_class_names)
        if deferred.is_deferred(self.module):
            load_deferred(self.module, self.sharding, cast(Deferrable, bundle), self.adapter, seed)
        self.sharding.adopt(self.module)
        if bundle.facts.expert_class_names:
            self.sharding.gather_each_once()
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
        self.seed = seed
        self.value_cfg = value_cfg or ValueConfig()
        self.value_head: nn.Module | None = None
        self.value_sharding: Sharding | None = None

    @property
    def device(self) -> torch.device:
        return self.home

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.optimizer_cfg.learning_rate * self.schedule.factor(self.updates, self.run_updates)

    # Updates

    def provide_value_head(self, build: BuildHead) -> nn.Module:
        if self.value_head is None:
            self.value_head = build(self.value_cfg.width, self.seed).eval().to(self.home)
            # A layout of its own: under the policy's, FSDP2 wants the root's forward first.
            self.value_sharding = self.sharding.beside()
            self.value_sharding.wrap(self.value_head, [], torch.float32)
            self.value_sharding.adopt(self.value_head, prefix=VALUE_HEAD)
            shards, config = self.value_sharding.shards, self.value_cfg
            group = {"params": list(shards.values()), "lr": config.learning_rate, "weight_decay": config.weight_decay}
            self.optimizer.add_param_group(group)
        return self.value_head

    @property
    def layouts(self) -> list[Sharding]:
        """Of everything that is trained: the policy, then the value head. The optimizer's groups, in order."""
        return [self.sharding] if self.value_sharding is None else [self.sharding, self.value_sharding]

    def backward(self, loss: Tensor, last: bool) -> None:
        for layout in self.layouts:
            layout.before_backward(last)
        loss.backward()
        for layout in self.layouts:
            layout.after_backward(last)

    def step(self, max_grad_norm: float, loss: Tensor) -> UpdateStats:
        lr = self.learning_rate()
        norms = [layout.gradient_norm() for layout in self.layouts]
        total = self.sharding.sum_over_ranks(loss).float().to(norms[0].device)
        *sizes, loss_value = torch.stack([*norms, total]).tolist()
        if not all(math.isfinite(value) for value in (*sizes, loss_value)):
            return self._skip(sizes, lr)
        limits = [max_grad_norm, self.value_cfg.max_grad_norm]
        for i, layout in enumerate(self.layouts):
            if sizes[i] > limits[i]:
                clip(layout.shards, norms[i], limits[i])
        self.optimizer.param_groups[0]["lr"] = lr
        for layout in self.layouts:
            layout.reshard()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average("update", self.updates)
        self.updates += 1
        self.skipped_in_a_row = 0
        return self._stats(sizes, lr)

    def _skip(self, norms: list[float], lr: float) -> UpdateStats:
        """Every rank comes here or none, since all saw the same norms and loss."""
        shards = self._all_shards()
        names = list(shards)
        gradients = [shard.grad for shard in shards.values()]
        bad = [i for i, grad in enumerate(gradients) if grad is not None and not grad.isfinite().all()]
        first = self.sharding.first_of_ranks(bad[0] if bad else len(names))
        culprit = names[first] if first < len(names) else "loss"
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped_in_a_row += 1
        return self._stats(norms, lr, culprit)

    def _stats(self, norms: list[float], lr: float, culprit: str = "") -> UpdateStats:
        return UpdateStats(
            grad_norm=norms[0],
            lr=lr,
            skipped=bool(culprit),
            skipped_in_a_row=self.skipped_in_a_row,
            culprit=culprit,
            value_grad_norm=norms[1] if self.value_head is not None else None,
        )

    def finish_step(self) -> None:
        # A snapshot is known by its name and the number of updates: where none was made, none may move.
        if self.updates > self.finished_updates:
            self._average("step", self.updates)
        self.finished_updates = self.updates

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
            raise IncompatibleError(f"the payload {payload!r} does not exist where {trained} trained")
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

    def _all_trainable(self) -> dict[str, nn.Parameter]:
        """What is trained, by names under which it is saved: in the order of the optimizer's groups."""
        return {name: parameter for layout in self.layouts for name, parameter in layout.trainable.items()}

    def _all_shards(self) -> dict[str, nn.Parameter]:
        return {name: shard for layout in self.layouts for name, shard in layout.shards.items()}

    def checkpoint_bytes(self) -> int:
        # Weights and AdamW's two moments, and the snapshots of the policy.
        copies = [3 + len(self.snapshots.stored), 3]
        return sum(
            count * sum(p.numel() * p.element_size() for p in layout.trainable.values())
            for count, layout in zip(copies, self.layouts, strict=False)
        )

    def save(self, directory: str) -> None:
        assert self.snapshots.in_force == LIVE, "a checkpoint inside weights(...) would save a snapshot as live weights"
        moments = state.optimizer_tensors(self.optimizer, self._all_shards())
        tensors: dict[str, state.Tensors] = {
            "weights": self._laid_out(self.shards),
            "optimizer": self._laid_out(moments),
            "snapshots": self._laid_out(self._snapshot_tensors()),
        }
        if self.value_sharding is not None:
            tensors["value"] = self._laid_out(self.value_sharding.shards)
        state.write(Path(directory), tensors, self._counters(), self.rank)

    def load(self, directory: str) -> None:
        counters, saved = self._opened(directory)
        state.check_snapshots(counters, sorted(self.snapshots.stored))
        found = saved.headers
        state.check_match("value head", found.get("value", {}), self._value_parameters())
        state.check_optimizer(found["optimizer"], self._all_trainable())
        moments = self._empty_moments(found["optimizer"])
        self._take_over(saved, self._all_shards(), moments)
        state.load_optimizer(self.optimizer, moments, self._all_shards())
        self.updates, self.skipped_in_a_row = counters.updates, counters.skipped_in_a_row
        self.finished_updates = self.updates  # checkpoints are made between steps

    def load_policy(self, directory: str) -> None:
        counters, saved = self._opened(directory)
        for name in counters.snapshots:
            if not self.has_snapshot(name):
                self.snapshots.take(name)
        self._take_over(saved, self.shards, {})
        self.updates = counters.updates

    def _opened(self, directory: str) -> tuple[state.Counters, state.SavedTensors]:
        counters = state.read_counters(Path(directory))
        state.check_trained_weights(counters, self.lora)
        return counters, state.open_tensors(Path(directory), counters.files, self.rank)

    def _take_over(
        self, saved: state.SavedTensors, shards: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> None:
        """Fill `shards`, all snapshots and `moments`."""
        snapshots = self._snapshot_tensors()
        state.check_match("weights", saved.headers["weights"], self.trainable)
        state.check_match("snapshots", saved.headers["snapshots"], self._laid_out(snapshots))
        # Into fresh tensors first: a file that breaks off changes nothing.
        held: dict[str, Tensor] = {**shards, **snapshots}
        fresh = {name: torch.empty_like(tensor) for name, tensor in held.items()}
        saved.read(self._laid_out({**fresh, **moments}))
        for layout in self.layouts:
            layout.reshard()
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(fresh[name])

    def _value_parameters(self) -> Mapping[str, nn.Parameter]:
        return {} if self.value_sharding is None else self.value_sharding.trainable

    def _empty_moments(self, found: state.Tensors) -> state.Tensors:
        moments, shards = {}, self._all_shards()
        for name in state.owners(found, shards):
            for key in state.MOMENTS:
                like = torch.zeros(()) if key == "step" else shards[name].detach()
                moments[f"{name}.{key}"] = torch.empty_like(like)
        return moments

    def _laid_out(self, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """Tensors of the state as parts of wholes, by the parameter that their name is made of."""
        parameters = self._all_trainable()
        return {name: self._laid_out_one(name, shard.detach(), parameters) for name, shard in shards.items()}

    def _laid_out_one(self, name: str, shard: Tensor, parameters: Mapping[str, nn.Parameter]) -> Any:
        key = name.rpartition(":")[2]
        if key.endswith(".step") and key not in parameters:
            return shard
        owner = key if key in parameters else key.rpartition(".")[0]
        return self.sharding.laid_out(parameters[owner], shard)

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
                if self.value_head is not None:
                    move_module(self.value_head, device)
                for layout in self.layouts:
                    layout.moved()
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


def check_component(name: str | None, facts: ModelFacts) -> None:
    """Raises ConfigError (2020) for another component than the one that the model's pipeline samples with."""
    if name not in (None, facts.trainable_attr):
        raise IncompatibleError(
            f"backend.trainable_attr={name}: the pipeline of {facts.family} samples and trains with "
            f"{facts.trainable_attr}. Write trainable_attr: {facts.trainable_attr}, or leave the key out"
        )


def lay_out(
    module: nn.Module,
    bundle: Trained,
    config: FSDPConfig,
    sharding: Sharding,
    block_class_names: tuple[str, ...] | None = None,
) -> None:
    """Storage dtypes, checkpointed and compiled blocks, shards; in place."""
    compute_dtype = usual_dtype(module)
    set_dtypes(module, config)
    names = block_class_names or bundle.facts.block_class_names
    blocks = [m for m in module.modules() if type(m).__name__ in names]
    if (config.activation_checkpointing or config.use_torch_compile or block_class_names) and not blocks:
        raise ConfigError(
            f"{type(module).__name__} has no block of {', '.join(names)} to shard, checkpoint or compile. "
            "Leave backend.block_class_names out to use the model's own"
        )
    for block in blocks:
        if config.use_torch_compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            # Around the compiled forward: the compiler does not look into a checkpoint that it meets first.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    experts = [m for m in module.modules() if type(m).__name__ in bundle.facts.expert_class_names]
    sharding.wrap(module, [*blocks, *experts], compute_dtype)


def usual_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most numbers: libraries keep norms and small tables of a module in bf16 wider."""
    numbers: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        numbers[parameter.dtype] += parameter.numel()
    return numbers.most_common(1)[0][0]


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
            raise IncompatibleError(
                f"{type(module).__name__}.{name} has dropout {child.p}, which would never act: the policy runs in eval "
                "mode in rollout and training. Set the model's dropout to 0"
            )


def set_dtypes(module: nn.Module, config: FSDPConfig) -> None:
    """Trainable weights to float32 masters, frozen ones to `param_dtype`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif config.param_dtype is not None:
            parameter.data = parameter.data.to(TORCH_DTYPES[config.param_dtype])
