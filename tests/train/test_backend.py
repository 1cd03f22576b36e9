"""The backend: updates as PyTorch makes them, a guard, state that comes back bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.toy import ToyBundle
from unirl.config.errors import CheckpointError, ConfigError
from unirl.testing.toy import toy_facts
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.optimizer import adamw
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, FSDPConfig, LoraConfig, TrainTopology
from unirl.types.facts import LatentFacts

ADAM = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def backend_of(bundle: ToyBundle | None = None, **options: Any) -> FSDPBackend:
    return FSDPBackend(bundle or ToyBundle(), **({"optimizer_cfg": ADAM} | options))


def loss_of(backend: FSDPBackend, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 4, 4, generator=generator)
    return scale * backend.module(x, torch.rand(4, generator=generator), torch.ones(4, 4)).square().mean()


def update(backend: FSDPBackend, seed: int, scale: float = 1.0, max_grad_norm: float = 1.0) -> Any:
    loss = loss_of(backend, seed, scale)
    backend.backward(loss, last=True)
    return backend.step(max_grad_norm, loss)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("reduce_dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])  # below and above the clip
def test_updates_equal_torch_clip_and_its_reference_adamw(scale: float, reduce_dtype: Any) -> None:
    backend, twin = backend_of(fsdp_cfg=FSDPConfig(reduce_dtype=reduce_dtype)), ToyBundle().trainable()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1, foreach=False, fused=False)
    for seed in range(3):
        stats = update(backend, seed, scale, max_grad_norm=0.5)
        other = FSDPBackend.__new__(FSDPBackend)
        other.module = twin
        loss_of(other, seed, scale).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for have, want in zip(backend.module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6)


def test_exact_updates_do_not_depend_on_how_a_tensor_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(73, generator=generator), 1e-5 * torch.randn(40, 73, generator=generator)

    def weights(*pieces: int) -> Tensor:
        parameters = [nn.Parameter(piece.clone()) for piece in start.split(pieces)]
        optimizer = adamw(parameters, ADAM, exact=True)
        for gradient in gradients:
            for parameter, piece in zip(parameters, gradient.split(pieces), strict=True):
                parameter.grad = piece.clone()
            optimizer.step()
        return torch.cat(parameters + [optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters]).detach()

    assert torch.equal(weights(73), weights(37, 36)) and torch.equal(weights(73), weights(19, 19, 19, 16))


def test_in_fp64_gradients_do_not_depend_on_the_order_of_their_parts() -> None:
    def gradients(order: list[int]) -> list[Tensor]:
        backend = backend_of(fsdp_cfg=FSDPConfig(reduce_dtype="fp64"))
        for i, seed in enumerate(order):
            backend.backward(loss_of(backend, seed), last=i == len(order) - 1)
        return [shard.grad for shard in backend.shards.values() if shard.grad is not None]

    first, second = gradients([0, 1, 2, 3, 4]), gradients([3, 0, 4, 2, 1])
    assert first and all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(first, second, strict=True))


def state_of(backend: FSDPBackend) -> dict[str, Tensor]:
    """Everything that may change, by name."""
    tensors = backend.gather() | backend._snapshot_tensors()
    for i, entry in enumerate(backend.optimizer.state.values()):
        tensors |= {f"{i}.{key}": value for key, value in entry.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(bad: float) -> None:
    backend = backend_of(ema_cfg=EmaFullConfig(every=1))
    update(backend, 0)
    before, lr = state_of(backend), backend.learning_rate()
    backend.backward(loss_of(backend, 1), last=True)
    parameter = backend.trainable["blocks.0.proj.weight"]
    assert parameter.grad is not None
    parameter.grad[0, 0] = bad
    stats = backend.step(1.0, torch.zeros(()))
    assert (stats.skipped, stats.skipped_in_a_row, stats.culprit) == (True, 1, "blocks.0.proj.weight")
    assert_equal(state_of(backend), before)
    assert (backend.updates, backend.learning_rate()) == (1, lr)
    assert all(p.grad is None for p in backend.trainable.values())
    assert update(backend, 2).skipped_in_a_row == backend.skipped_in_a_row == 0


def test_a_loss_that_is_not_finite_is_skipped_even_if_its_gradient_is() -> None:
    backend = backend_of()
    backend.backward(loss_of(backend, 0), last=True)
    stats = backend.step(1.0, torch.tensor(torch.inf))
    assert stats.skipped and stats.culprit == "loss" and backend.updates == 0


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lora_cfg": LoraConfig(rank=2), "ema_lora_cfg": EmaLoraConfig(rate=0.3)},
    {"ema_cfg": EmaFullConfig(every=2), "fsdp_cfg": FSDPConfig(activation_checkpointing=True)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["full", "lora", "ema"])
def test_a_loaded_backend_continues_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    unbroken = backend_of(**options)
    unbroken.snapshot("reference")
    for seed in range(3):
        update(unbroken, seed)
        unbroken.finish_step()
    unbroken.save(str(tmp_path / "policy"))
    resumed = backend_of(**options)
    resumed.snapshot("reference")
    resumed.load(str(tmp_path / "policy"))
    assert_equal(state_of(resumed), state_of(unbroken))
    for seed in range(3, 6):
        for backend in (unbroken, resumed):
            update(backend, seed)
            backend.finish_step()
    assert_equal(state_of(resumed), state_of(unbroken))
    assert resumed.updates == unbroken.updates == 6


def test_a_checkpoint_before_the_first_update_loads(tmp_path: Path) -> None:
    backend_of().save(str(tmp_path))
    fresh = backend_of()
    update(fresh, 0)
    fresh.load(str(tmp_path))
    assert fresh.updates == 0 and not fresh.optimizer.state
    assert_equal(dict(fresh.gather()), dict(backend_of().gather()))


def test_the_files_are_safetensors_and_json_only(tmp_path: Path) -> None:
    backend_of().save(str(tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "backend.json").read_text())["updates"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_cfg": LoraConfig(rank=3)}, "trained weights are"),
        ({"lora_cfg": LoraConfig(rank=2, alpha=1.0)}, "trained weights are"),
        ({}, "trained weights are"),
        ({"lora_cfg": LoraConfig(rank=2), "ema_cfg": EmaFullConfig()}, "weight snapshots are"),
        ({"bundle": ToyBundle(width=8), "lora_cfg": LoraConfig(rank=2)}, r"proj\.lora_A.*\(2, 16\).*not \(2, 8\)"),
        ({"bundle": ToyBundle(blocks=2), "lora_cfg": LoraConfig(rank=2)}, r"blocks\.1\.proj.*is missing"),
    ],
)
def test_a_checkpoint_of_another_model_or_adapter_is_refused_and_changes_nothing(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = backend_of(lora_cfg=LoraConfig(rank=2))
    update(source, 0)
    source.save(str(tmp_path))
    other = backend_of(**options)
    before = state_of(other)
    with pytest.raises(CheckpointError, match=message) as raised:
        other.load(str(tmp_path))
    assert raised.value.code == 7002
    assert_equal(state_of(other), before)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "backend.json"])
@pytest.mark.parametrize("damage", [Path.unlink, _truncate], ids=["missing", "truncated"])
def test_a_damaged_file_is_named_and_changes_nothing(tmp_path: Path, name: str, damage: Any) -> None:
    source = backend_of()
    update(source, 0)
    source.save(str(tmp_path))
    damage(tmp_path / name)
    other = backend_of()
    before = state_of(other)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as raised:
        other.load(str(tmp_path))
    assert raised.value.code == 7001
    assert_equal(state_of(other), before)


def test_activation_checkpointing_changes_no_gradient_and_saves_fewer_tensors() -> None:
    plain = backend_of(ToyBundle(blocks=3))
    saving = backend_of(ToyBundle(blocks=3), fsdp_cfg=FSDPConfig(activation_checkpointing=True))
    saved = []
    for backend in (plain, saving):
        count: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, c=count: (c.append(t.numel()), t)[1], lambda t: t):
            loss = loss_of(backend, 0)
        loss.backward()
        saved.append(sum(count))
    for name, parameter in plain.trainable.items():
        assert torch.equal(parameter.grad, saving.trainable[name].grad), name
    assert saved[1] < saved[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    calls: list[str] = []

    def compile_(forward: Any, **_: Any) -> Any:  # the compiler itself takes 20 s to import
        return lambda *inputs: (calls.append(type(forward.__self__).__name__), forward(*inputs))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    config = FSDPConfig(use_torch_compile=True, activation_checkpointing=checkpointed)
    loss_of(backend_of(ToyBundle(blocks=2), fsdp_cfg=config), 0).backward()
    assert calls == ["ToyBlock"] * (4 if checkpointed else 2)  # recomputing runs the compiled forward too


class Narrow:
    """A bundle whose module has dropout, or no block."""

    facts: LatentFacts = toy_facts()

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def trainable(self) -> nn.Module:
        return self.module


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sequential\.1 has dropout 0\.1"):
        FSDPBackend(Narrow(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), optimizer_cfg=ADAM)
    with pytest.raises(ConfigError, match="no block"):
        FSDPBackend(Narrow(nn.Linear(2, 2)), optimizer_cfg=ADAM, fsdp_cfg=FSDPConfig(activation_checkpointing=True))
    with pytest.raises(ConfigError, match="no trainable parameter"):
        FSDPBackend(Narrow(nn.Linear(2, 2).requires_grad_(False)), optimizer_cfg=ADAM)
    with pytest.raises(ConfigError, match=r"topology\.tp=2 is not available"):
        TrainTopology(tp=2)
    with pytest.raises(ConfigError, match=r"defer_grad_sync=false rounds"):
        FSDPConfig(reduce_dtype="fp64", defer_grad_sync=False)
    with pytest.raises(ConfigError, match=r"shard_size must be >= 1"):
        FSDPConfig(shard_size=0)
    with pytest.raises(ConfigError, match="1 ranks train"):
        backend_of(topology=TrainTopology(dp=2))


def test_a_module_that_was_left_in_training_mode_is_trained_in_eval_mode() -> None:
    bundle = ToyBundle()
    bundle.trainable().train()
    assert not any(module.training for module in backend_of(bundle).module.modules())


def test_sampling_runs_without_gradients() -> None:
    backend = backend_of()
    with backend.sampling():
        assert not backend.module(torch.zeros(1, 3, 4, 4), torch.ones(1), torch.ones(1, 4)).requires_grad


def test_offload_and_onload_keep_the_parameters_and_the_bits() -> None:
    backend = backend_of(ema_cfg=EmaFullConfig())
    update(backend, 0)
    before, parameters = state_of(backend), list(backend.module.parameters())
    backend.offload(("policy", "optimizer"))
    backend.onload(("policy", "optimizer"))
    assert_equal(state_of(backend), before)
    assert all(a is b for a, b in zip(parameters, backend.module.parameters(), strict=True))
    assert not update(backend, 1).skipped


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_offloaded_state_is_off_the_device() -> None:
    bundle = ToyBundle()
    bundle.trainable().cuda()
    backend = backend_of(bundle, ema_cfg=EmaFullConfig())
    optimizer = backend.optimizer
    loss = backend.module(*(t.cuda() for t in (torch.zeros(2, 3, 4, 4), torch.ones(2), torch.ones(2, 4)))).sum()
    backend.backward(loss, last=True)
    backend.step(1.0, loss)
    before = state_of(backend)
    backend.offload(("policy", "optimizer"))
    held = [*backend.module.parameters(), *backend.snapshots.stored["ema"].values()]
    held += [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(tensor.device.type == "cpu" for tensor in held)
    backend.onload(("policy", "optimizer"))
    assert_equal(state_of(backend), before)
    assert backend.device.type == "cuda"


def test_block_class_names_of_the_recipe_replace_those_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"has no block of NoSuchBlock.*Leave backend.block_class_names out"):
        backend_of(block_class_names=("NoSuchBlock",))
    checkpointed = backend_of(block_class_names=("Linear",), fsdp_cfg=FSDPConfig(activation_checkpointing=True))
    layers = [m for m in checkpointed.module.modules() if isinstance(m, nn.Linear)]
    assert layers and all("checkpoint" in repr(layer.forward) for layer in layers)


def test_only_the_component_that_the_model_trains_may_be_named() -> None:
    assert backend_of(trainable_attr=ToyBundle().facts.trainable_attr).trainable
    with pytest.raises(ConfigError, match=r"trainable_attr=vae: the pipeline of toy .* Write trainable_attr: denoiser"):
        backend_of(trainable_attr="vae")


def test_fsdp_mode_agrees_with_shard_size() -> None:
    assert FSDPConfig(fsdp_mode="hybrid", shard_size=8).shard_size == 8
    assert FSDPConfig(fsdp_mode="full").shard_size is None
    with pytest.raises(ConfigError, match=r"fsdp_mode=full shards over all ranks, and shard_size=2"):
        FSDPConfig(fsdp_mode="full", shard_size=2)
    with pytest.raises(ConfigError, match=r"Set fsdp_cfg.shard_size to the number of devices of one node"):
        FSDPConfig(fsdp_mode="hybrid")
