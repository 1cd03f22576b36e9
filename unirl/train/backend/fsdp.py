"""The train backend: plain PyTorch with whole weights on one rank, FSDP2 with sharded weights on several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import ConfigError, IncompatibleError
from unirl.distributed import current
from unirl.distributed.weight_sync.base import Payload
from unirl.models.base import Bundle
from unirl.models.loading.dtypes import set_compute_dtype
from unirl.models.loading.lora import ADAPTER, AdapterCopies, AdapterStart
from unirl.train.backend import module_setup, state
from unirl.train.backend.base import (
    BuildHead,
    Kept,
    LrSchedulerConfig,
    Offloadable,
    OptimizerConfig,
    TrainBackend,
    UpdateStats,
)
from unirl.train.backend.health import NonFinite, not_finite
from unirl.train.backend.optimizer import adamw, empty_moments, load_optimizer, move_optimizer, optimizer_tensors
from unirl.train.backend.sharding import FSDP2Sharding, Sharding
from unirl.train.backend.snapshots import LIVE, Snapshots
from unirl.train.backend.writer import FileWriter, Piece, Pieces
from unirl.train.configs import (
    EmaFullConfig,
    EmaLoraConfig,
    FSDPConfig,
    LoraConfig,
    SnapshotConfig,
    SnapshotRule,
    TrainTopology,
    ValueConfig,
)
from unirl.types.device import CPU, move_module, to_device
from unirl.types.facts import LoraSpec

VALUE_HEAD = "value_head"
"""The prefix of the names of the value head's parameters."""


class FSDPBackend(TrainBackend):
    """Trains adapters or all weights of one module with AdamW. The module stays in eval mode."""

    toy: ClassVar[Mapping[str, object]] = {"fsdp_cfg.reduce_dtype": "fp64"}

    def __init__(
        self,
        bundle: Bundle,
        seed: int = 0,
        run_updates: int | None = None,
        *,
        optimizer_cfg: OptimizerConfig,
        scheduler_cfg: LrSchedulerConfig | None = None,
        fsdp_cfg: FSDPConfig | None = None,
        lora_cfg: LoraConfig | None = None,
        ema_cfg: EmaFullConfig | None = None,
        ema_lora_cfg: EmaLoraConfig | None = None,
        snapshots: Mapping[str, SnapshotConfig] | None = None,
        topology: TrainTopology | None = None,
        value_cfg: ValueConfig | None = None,
        block_class_names: tuple[str, ...] | None = None,
        trainable_attr: str | None = None,
    ) -> None:
        """
        Args:
            seed: the seed of the run. The initial values of adapters and of the value head are derived from it.
            run_updates: number of optimizer updates of the whole run. Schedules without an end of their own end there.
            lora_cfg: settings of the adapters. If absent, all weights are trained.
            snapshots: weight snapshots that are loaded from other checkpoints, such as a `teacher`.
            value_cfg: settings of the value head. Used only if the loss needs one.
            block_class_names: names of the block classes. Blocks are sharded, checkpointed and compiled one by one. If
                absent, the model's own (ModelFacts.block_class_names).
            trainable_attr: the component that is trained. If absent, the model's own, which is the only allowed value.
        """
        self.rank = current()
        self.seed = seed
        self.run_updates = run_updates
        self.optimizer_cfg = optimizer_cfg
        self.schedule = scheduler_cfg or LrSchedulerConfig()
        self.lora = lora_cfg
        self.value_cfg = value_cfg or ValueConfig()
        self.rules: tuple[SnapshotRule, ...] = tuple(rule for rule in (ema_cfg, ema_lora_cfg) if rule is not None)
        self.updates = 0
        self.skipped_in_a_row = 0
        self.finished_updates = 0
        """Number of updates that were done when the last training step ended."""
        self.is_sampling = False
        self.writer = FileWriter()
        self.kept: dict[str, Kept] = {}
        self.aside: list[dict[str, Tensor | None]] = []
        """Gradients that wait for `join_gradients`."""
        self.value_head: nn.Module | None = None
        self.value_sharding: Sharding | None = None
        config = fsdp_cfg or FSDPConfig()
        config.check_ranks(self.rank.dp_size)
        (topology or TrainTopology()).check_ranks(self.rank.dp_size)
        self.schedule.check(run_updates)
        module_setup.check_component(trainable_attr, bundle.facts)
        self.prepare_module(bundle, config, block_class_names)
        self.snapshots = Snapshots(self.sharding)
        for rule in self.rules:
            self.snapshots.take(rule.snapshot)
        for name, source in (snapshots or {}).items():
            self.snapshots.load(name, source, bundle, self.module)

    def prepare_module(self, bundle: Bundle, config: FSDPConfig, block_class_names: tuple[str, ...] | None) -> None:
        """Prepare the bundle's module for training, in place. The order of the steps matters."""
        # 1. The policy stays in eval mode, so dropout would have no effect.
        self.module = bundle.trainable().eval()
        module_setup.refuse_dropout(self.module)
        # 2. Adapters decide which parameters are trained. The next steps treat trained and frozen ones differently.
        facts, lora = bundle.facts, self.lora
        self.adapter: LoraSpec | None = None
        start: AdapterStart | None = None
        if lora is not None:
            self.adapter, start = module_setup.add_adapters(bundle, lora, self.seed)
        # 3. Set the storage dtypes. The compute dtype is read before, because it is the dtype that the bundle loaded.
        compute_dtype = module_setup.usual_dtype(self.module)
        module_setup.set_dtypes(self.module, config)
        # 4. Compile and checkpoint the forward of each block before FSDP2 puts its hooks around it.
        needs_blocks = config.activation_checkpointing or config.use_torch_compile or bool(block_class_names)
        class_names = block_class_names or facts.block_class_names
        blocks = module_setup.blocks_of(self.module, class_names, required=needs_blocks)
        module_setup.wrap_blocks(blocks, config)
        # 5. Shard the blocks, then the experts, then the rest. FSDP2 replaces the parameters by DTensors.
        pieces = [*blocks, *module_setup.blocks_of(self.module, facts.expert_class_names)]
        self.sharding = Sharding(config) if self.rank.dp_size == 1 else FSDP2Sharding(config, self.rank)
        gathered = module_setup.gather_dtype(self.module, config, compute_dtype, frozen_base=lora is not None)
        self.sharding.wrap(self.module, pieces, gathered)
        set_compute_dtype(self.module, gathered.dtype)
        # 6. Give storage to a module that has none. After sharding, no rank ever holds more than its shards.
        if next(self.module.parameters()).is_meta:
            module_setup.load_deferred(
                self.module, self.sharding, bundle.saved(), bundle.device, self.adapter, self.seed, start
            )
        # 7. Collect the parameters. From here on, the parameter objects stay the same.
        self.sharding.adopt(self.module)
        if self.rank.dp_size == 1 and not config.use_torch_compile:
            AdapterCopies.attach(self.module)
        if facts.expert_class_names:
            self.sharding.gather_each_once()
        self.device = next(self.module.parameters()).device
        self.trainable = self.sharding.trainable
        if not self.trainable:
            raise ConfigError(
                f"{type(self.module).__name__} has no trainable parameter. Unfreeze some of them, or set "
                "backend.lora_cfg"
            )
        # 8. Build the optimizer over this rank's shards.
        self.shards = self.sharding.shards
        self.optimizer = adamw(self.shards.values(), self.optimizer_cfg, exact=config.reduce_dtype == "fp64")

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.optimizer_cfg.learning_rate * self.schedule.factor(self.updates, self.run_updates)

    # Updates

    def provide_value_head(self, build: BuildHead) -> nn.Module:
        if self.value_head is None:
            self.value_head = build(self.value_cfg.width, self.seed).eval().to(self.device)
            # The head has its own sharding. Inside the policy's, FSDP2 would expect a forward of the policy first.
            self.value_sharding = self.sharding.for_another_module()
            self.value_sharding.wrap(self.value_head, [])
            self.value_sharding.adopt(self.value_head, prefix=VALUE_HEAD)
            shards, config = self.value_sharding.shards, self.value_cfg
            group = {"params": list(shards.values()), "lr": config.learning_rate, "weight_decay": config.weight_decay}
            self.optimizer.add_param_group(group)
        return self.value_head

    def keep(self, name: str, kept: Kept) -> None:
        self.kept[name] = kept

    @property
    def layouts(self) -> list[Sharding]:
        """The shardings of the policy and, if there is one, of the value head, in the order of the optimizer groups."""
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
                layout.clip(norms[i], limits[i])
        self.optimizer.param_groups[0]["lr"] = lr
        for layout in self.layouts:
            layout.reshard()
        self.optimizer.step()
        self.drop_gradients()
        self._average("update", self.updates)
        self.updates += 1
        self.skipped_in_a_row = 0
        return self._stats(sizes, lr)

    def drop_gradients(self) -> None:
        for layout in self.layouts:
            for shard in layout.shards.values():
                shard.grad = None

    def set_gradient_aside(self) -> float:
        norm = float(torch.stack([layout.gradient_norm() for layout in self.layouts]).norm())
        self.aside.append({name: shard.grad for name, shard in self._all_shards().items()})
        self.drop_gradients()
        return norm

    def join_gradients(self, factors: Sequence[float]) -> None:
        gradients, self.aside = self.aside, []
        for name, shard in self._all_shards().items():
            parts = [
                factor * part
                for factor, each in zip(factors, gradients, strict=True)
                if (part := each[name]) is not None
            ]
            shard.grad = torch.stack(parts).sum(0) if parts else None

    def _skip(self, norms: list[float], lr: float) -> UpdateStats:
        """Drop the gradient and count the update as skipped.

        This is a collective. All ranks call it or none does, because the norms and the loss are equal on all ranks.
        """
        shards = self._all_shards()
        names = list(shards)
        gradients = [shard.grad for shard in shards.values()]
        bad = [i for i, grad in enumerate(gradients) if grad is not None and not grad.isfinite().all()]
        [negative] = self.rank.max_over_dp([-(bad[0] if bad else len(names))])
        culprit = [*names, "loss"][-negative]  # the smallest index over the ranks
        self.drop_gradients()
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

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        for layout in self.layouts:
            layout.reshard()
            for name in layout.trainable.keys() & values.keys():
                rows = values[name][layout.rows(layout.trainable[name])]
                layout.shards[name].copy_(to_device(rows, self.device))

    def finish_step(self) -> None:
        # The name and the number of updates identify a snapshot, so it may change only if an update was done.
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
        if self.is_sampling:
            raise RuntimeError(
                f"weights({name!r}) inside sampling() would run with live weights, which are already gathered. "
                "Enter weights(...) first, and sampling() inside it"
            )
        # Reshard before and after the block, because a gathered module would run without reading the shards.
        self.sharding.reshard()
        with self.snapshots.swapped_in(name):
            try:
                yield
            finally:
                self.sharding.reshard()

    @contextmanager
    def sampling(self, gather: bool = True) -> Iterator[None]:
        self.is_sampling = True
        try:
            with torch.no_grad(), self.sharding.gathered() if gather else self.sharding.in_lockstep():
                yield
        finally:
            self.is_sampling = False

    def has_snapshot(self, name: str) -> bool:
        return name in self.snapshots.stored

    def snapshot(self, name: str) -> None:
        self.snapshots.take(name)

    def gather(self, name: str = LIVE) -> Mapping[str, Tensor]:
        return {key: tensor.cpu().clone() for key, tensor in self._whole_tensors(name)}

    def adapter_spec(self) -> LoraSpec | None:
        return self.adapter

    def named_tensors(self, payload: Payload, weights: str = LIVE) -> Iterator[tuple[str, Tensor]]:
        if (payload == "full") == (self.adapter is not None):
            trained, others = (
                ("all weights are", "full") if self.adapter is None else ("an adapter is", "adapter or merged")
            )
            raise IncompatibleError(f"the payload {payload!r} does not exist where {trained} trained. Use {others}")
        return self._merged_tensors(weights) if payload == "merged" else self._whole_tensors(weights)

    def _whole_tensors(self, weights: str) -> Iterator[tuple[str, Tensor]]:
        values = self._shards_of(weights)
        for name, parameter in self.trainable.items():
            yield name, self.sharding.whole(parameter, values[name])

    def _merged_tensors(self, weights: str) -> Iterator[tuple[str, Tensor]]:
        assert self.adapter is not None
        values = self._shards_of(weights)
        for name in [name for name in self.trainable if ".lora_A." in name]:
            layer = name.removesuffix(f".lora_A.{ADAPTER}.weight")
            a, b = (f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB")
            whole_a, whole_b = (self.sharding.whole(self.trainable[key], values[key]) for key in (a, b))
            base = self.sharding.whole(self.sharding.parameters[f"{layer}.base_layer.weight"])
            yield f"{layer}.weight", base.float() + self.adapter.scale * (whole_b @ whole_a)

    def _shards_of(self, weights: str) -> Mapping[str, Tensor]:
        if weights == LIVE:
            return {name: shard.detach() for name, shard in self.shards.items()}
        return self.snapshots.trained_values(weights)

    # State

    def _all_shards(self) -> dict[str, nn.Parameter]:
        """All trained shards by the names under which they are saved, in the order of the optimizer groups."""
        return {name: shard for layout in self.layouts for name, shard in layout.shards.items()}

    def checkpoint_bytes(self) -> int:
        # The policy has its weights, AdamW's two moments and its snapshots; the value head has no snapshots.
        copies = [3 + len(self.snapshots.changing), 3]
        return sum(
            count * sum(p.numel() * p.element_size() for p in layout.trainable.values())
            for count, layout in zip(copies, self.layouts, strict=False)
        )

    def _saved_shards(self) -> dict[str, Mapping[str, Tensor]]:
        """This rank's part of all tensors that a checkpoint contains, by the stem of their file."""
        assert self.snapshots.active == LIVE, "inside weights(...) a snapshot would be saved as live weights"
        shards: dict[str, Mapping[str, Tensor]] = {
            "weights": self.shards,
            "optimizer": optimizer_tensors(self.optimizer, self._all_shards()),
            "snapshots": self._snapshot_tensors(),
        }
        return shards if self.value_sharding is None else shards | {"value": self.value_sharding.shards}

    def nonfinite(self) -> tuple[NonFinite, ...]:
        shards = {(stem, name): part for stem, parts in self._saved_shards().items() for name, part in parts.items()}
        names = {f"{stem}: {name}": (stem, name) for stem, name in shards}
        own = set(not_finite({name: shards[key] for name, key in names.items()}))
        # Every rank learns which tensors are concerned, because the whole ones below are gathered by all ranks.
        flags = self.rank.max_over_dp([name in own for name in names])
        concerned = [name for name, flag in zip(names, flags, strict=True) if flag]
        return tuple(NonFinite.of(name, self._whole(names[name][1], shards[names[name]])) for name in concerned)

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor of which this rank saves `shard` under `name`. A collective."""
        owner = self._owners([name])[name]
        return shard.detach() if owner is None else self.sharding.whole(owner, shard.detach())

    def save(self, directory: str, in_background: bool = False) -> None:
        pieces = {stem: self._pieces(shards) for stem, shards in self._saved_shards().items()}
        if self.kept:
            pieces["kept"] = {name: Piece(tensor) for name, tensor in self._kept_tensors().items()}
        snapshots = tuple(sorted(self.snapshots.changing))
        counters = state.Counters(self.updates, self.skipped_in_a_row, state.trained_weights(self.lora), snapshots)
        state.write(Path(directory), pieces, counters, self.rank, self.writer, in_background)

    def finish_save(self, wait: bool) -> None:
        self.writer.finish(wait)

    def load(self, directory: str) -> None:
        counters, saved = self._opened(directory)
        state.check_equal("weight snapshots", list(counters.snapshots), sorted(self.snapshots.changing))
        shards = self._all_shards()
        head = {} if self.value_sharding is None else self.value_sharding.trainable
        state.check_match("value head", saved.headers.get("value", {}), head)
        moments = empty_moments(saved.headers["optimizer"], shards)
        state.check_match("optimizer states", saved.headers["optimizer"], self._to_dtensors(moments))
        kept = self._own_kept(saved)
        saved.read(kept)
        self._take_over(saved, shards, moments)
        for name, each in self.kept.items():
            start = self._kept_prefix(name)
            each.restore({key.removeprefix(start): value for key, value in kept.items() if key.startswith(start)})
        load_optimizer(self.optimizer, moments, shards)
        self.updates, self.skipped_in_a_row = counters.updates, counters.skipped_in_a_row
        self.finished_updates = self.updates  # checkpoints are written only between steps

    def load_policy(self, directory: str) -> None:
        counters, saved = self._opened(directory, unread="optimizer")
        for name in counters.snapshots:
            if not self.has_snapshot(name):
                self.snapshots.take(name)
        self._take_over(saved, self.shards, {})
        self.updates = counters.updates

    def _opened(self, directory: str, unread: str | None = None) -> tuple[state.Counters, state.SavedTensors]:
        """The counters and the tensors of a checkpoint. Files of the stem `unread` may be damaged."""
        counters = state.read_counters(Path(directory))
        state.check_trained_weights(counters, self.lora)
        files = [name for name in counters.files if unread is None or not name.startswith(unread)]
        return counters, state.open_tensors(Path(directory), files, self.rank)

    def _take_over(
        self, saved: state.SavedTensors, shards: Mapping[str, Tensor], moments: Mapping[str, Tensor]
    ) -> None:
        """Fill `shards`, the snapshots that follow training, and `moments` from a checkpoint."""
        snapshots = self._snapshot_tensors()
        state.check_match("weights", saved.headers["weights"], self.trainable)
        state.check_match("snapshots", saved.headers["snapshots"], self._to_dtensors(snapshots))
        # Read into new tensors first, so that a damaged file changes nothing.
        targets: dict[str, Tensor] = {**shards, **snapshots}
        fresh = {name: torch.empty_like(tensor) for name, tensor in targets.items()}
        saved.read(self._to_dtensors({**fresh, **moments}))
        for layout in self.layouts:
            layout.reshard()
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.copy_(fresh[name])

    def _kept_prefix(self, name: str) -> str:
        return f"{self.rank.dp_rank}:{name}:"

    def _kept_tensors(self) -> dict[str, Tensor]:
        """The state of the objects that are saved beside the weights, on this rank."""
        states = {self._kept_prefix(name): each.state() for name, each in self.kept.items()}
        return {f"{start}{key}": value.detach() for start, state in states.items() for key, value in state.items()}

    def _own_kept(self, saved: state.SavedTensors) -> dict[str, Tensor]:
        """Uninitialised tensors for what this rank saved of `self.kept`."""
        headers = saved.headers["kept"]
        own = f"{self.rank.dp_rank}:"
        names = [name for name in headers if name.startswith(own)]
        found = sorted({name.removeprefix(own).partition(":")[0] for name in names})
        state.check_equal("objects beside the weights", found, sorted(self.kept))
        return {name: torch.empty_like(headers[name], device=CPU) for name in names}

    def _to_dtensors(self, shards: Mapping[str, Tensor]) -> state.Tensors:
        """Convert tensors of the state to DTensors. Each is sharded like the parameter that its name contains."""
        owners = self._owners(shards)
        return {
            name: shard.detach() if (owner := owners[name]) is None else self.sharding.to_dtensor(owner, shard.detach())
            for name, shard in shards.items()
        }

    def _pieces(self, shards: Mapping[str, Tensor]) -> Pieces:
        """The rows of tensors of the state that this rank writes."""
        owners = self._owners(shards)
        written = {name: self.sharding.written(owners[name], shard.detach()) for name, shard in shards.items()}
        return {name: piece for name, piece in written.items() if piece is not None}

    def _owners(self, names: Iterable[str]) -> dict[str, nn.Parameter | None]:
        """The parameter that each tensor of the state is laid out like. None: the tensor is a count of updates."""
        parameters = {name: parameter for layout in self.layouts for name, parameter in layout.trainable.items()}
        owners: dict[str, nn.Parameter | None] = {}
        for name in names:
            key = name.rpartition(":")[2]
            is_count = key.endswith(".step") and key not in parameters
            owners[name] = None if is_count else parameters[key if key in parameters else key.rpartition(".")[0]]
        return owners

    def _snapshot_tensors(self) -> dict[str, Tensor]:
        return {f"{s}:{key}": tensor for s, values in self.snapshots.changing.items() for key, tensor in values.items()}

    # Offloading

    def offload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, CPU)
        current().free_unused()

    def onload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, self.device)

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
