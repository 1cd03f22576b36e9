"""The train backend over plain PyTorch: one process now, FSDP2 shards under a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.config.errors import ConfigError
from unirl.distributed import current
from unirl.models.lora import LoraSpec, choose_targets, inject_lora
from unirl.train.backend import state
from unirl.train.backend.base import LrSchedulerConfig, Offloadable, OptimizerConfig, TrainBackend, UpdateStats
from unirl.train.backend.offload import move_module, move_optimizer
from unirl.train.backend.snapshots import LIVE, Snapshots
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, FSDPConfig, LoraConfig, SnapshotRule, TrainTopology
from unirl.types.protocols import TORCH_DTYPES, ModelFacts


class Trained(Protocol):
    """What the backend asks of a bundle."""

    facts: ModelFacts

    def trainable(self) -> nn.Module:
        """The module whose parameters with `requires_grad` are trained, in place."""
        ...


class FSDPBackend(TrainBackend):
    """Trains adapters or all weights of one module by AdamW. The module stays in eval mode."""

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
        check_topology(topology or TrainTopology())
        self.schedule = scheduler_cfg or LrSchedulerConfig()
        self.run_updates = run_updates
        self.optimizer_cfg = optimizer_cfg
        self.lora = lora_cfg
        self.updates = 0
        self.skipped_in_a_row = 0
        self.module = prepare_module(bundle, fsdp_cfg or FSDPConfig(), lora_cfg, seed)
        self.home = next(self.module.parameters()).device
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise ConfigError(f"{type(self.module).__name__} has no trainable parameter: unfreeze it or set lora_cfg")
        self.optimizer = adamw(list(self.trainable.values()), optimizer_cfg)
        self.schedule.check(run_updates)
        self.rules: tuple[SnapshotRule, ...] = tuple(rule for rule in (ema_cfg, ema_lora_cfg) if rule is not None)
        self.snapshots = Snapshots(self.trainable)
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
        loss.backward()

    def step(self, max_grad_norm: float, loss: Tensor) -> UpdateStats:
        lr = self.learning_rate()
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        norm_value, loss_value = torch.stack([norm.float(), loss.detach().float().to(norm.device)]).tolist()
        if not torch.isfinite(torch.tensor([norm_value, loss_value])).all():
            return self._skip(norm_value, lr)
        if norm_value > max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.trainable.values(), max_grad_norm, norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average("update", self.updates)
        self.updates += 1
        self.skipped_in_a_row = 0
        return UpdateStats(norm_value, lr, skipped=False, skipped_in_a_row=0)

    def _skip(self, norm: float, lr: float) -> UpdateStats:
        gradients = {name: p.grad for name, p in self.trainable.items() if p.grad is not None}
        culprit = next((name for name, grad in gradients.items() if not grad.isfinite().all()), "loss")
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

    def weights(self, name: str) -> AbstractContextManager[None]:
        return self.snapshots.swapped_in(name)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @property
    def snapshot_names(self) -> tuple[str, ...]:
        return tuple(self.snapshots.stored)

    def snapshot(self, name: str) -> None:
        self.snapshots.take(name)

    def gather(self, name: str = LIVE) -> Mapping[str, Tensor]:
        if name == LIVE:
            return {key: p.detach().cpu().clone() for key, p in self.trainable.items()}
        self.snapshots.require(name)
        return {key: tensor.cpu().clone() for key, tensor in self.snapshots.stored[name].items()}

    # State

    def checkpoint_bytes(self) -> int:
        copies = 3 + len(self.snapshots.stored)  # weights and AdamW's two moments, and the snapshots
        return copies * sum(p.numel() * p.element_size() for p in self.trainable.values())

    def save(self, directory: str) -> None:
        assert self.snapshots.in_force == LIVE, "a checkpoint inside weights(...) would save a snapshot as live weights"
        tensors: dict[str, state.Tensors] = {
            "weights": dict(self.trainable),
            "optimizer": state.optimizer_tensors(self.optimizer, self.trainable),
            "snapshots": self._snapshot_tensors(),
        }
        state.write(Path(directory), tensors, self._counters())

    def load(self, directory: str) -> None:
        path = Path(directory)
        counters = state.read_counters(path)
        self._check_counters(counters)
        files = {stem: state.read_tensors(path, stem) for stem in ("weights", "optimizer", "snapshots")}
        state.check_match("weights", files["weights"], self.trainable)
        state.check_match("snapshots", files["snapshots"], self._snapshot_tensors())
        state.check_optimizer(files["optimizer"], self.trainable)
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(files["weights"][name])
            for name, tensor in self._snapshot_tensors().items():
                tensor.copy_(files["snapshots"][name])
        state.load_optimizer(self.optimizer, files["optimizer"], self.trainable)
        self.updates, self.skipped_in_a_row = counters.updates, counters.skipped_in_a_row

    def _snapshot_tensors(self) -> dict[str, Tensor]:
        return {f"{s}:{key}": tensor for s, held in self.snapshots.stored.items() for key, tensor in held.items()}

    def _counters(self) -> state.Counters:
        adapter = "full" if self.lora is None else ", ".join(f"{k}={v}" for k, v in asdict(self.lora).items())
        names = tuple(sorted(self.snapshots.stored))
        return state.Counters(self.updates, self.skipped_in_a_row, adapter=adapter, snapshots=names)

    def _check_counters(self, found: state.Counters) -> None:
        here = self._counters()
        for what, theirs, ours in (
            ("trained weights", found.adapter, here.adapter),
            ("weight snapshots", list(found.snapshots), list(here.snapshots)),
        ):
            if theirs != ours:
                raise state.CheckpointError(
                    f"the checkpoint's {what} are {theirs!r}, this recipe's are {ours!r}: resume with the recipe that "
                    "wrote it, or start anew with resume=none",
                    code=7002,
                )

    # Residency

    def offload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, torch.device("cpu"))

    def onload(self, names: Sequence[Offloadable]) -> None:
        self._move(names, self.home)

    def _move(self, names: Sequence[Offloadable], device: torch.device) -> None:
        for name in names:
            if name == "policy":
                move_module(self.module, device)
                self.snapshots.to(device)
            else:
                move_optimizer(self.optimizer, device)


def check_topology(topology: TrainTopology) -> None:
    """Raises ConfigError where the run's ranks are not what the topology says, or are more than this backend spans."""
    ranks = current().dp_size
    if topology.dp != ranks or ranks != 1:
        raise ConfigError(
            f"topology.dp={topology.dp} in a role of {ranks} data-parallel ranks: this backend trains on one device. "
            "Use num_devices=1",
            code=2010,
        )


def prepare_module(bundle: Trained, config: FSDPConfig, lora: LoraConfig | None, seed: int) -> nn.Module:
    """The bundle's trained module, in place: eval mode, adapters, storage dtypes, checkpointed and compiled blocks."""
    module = bundle.trainable().eval()
    refuse_dropout(module)
    if lora is not None:
        targets = choose_targets(module, lora.target_modules, bundle.facts.lora_targets)
        inject_lora(module, LoraSpec(lora.rank, lora.alpha, targets), seed)
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
    return module


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


def adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in its fused form: one pass over the weights."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
