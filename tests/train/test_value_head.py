"""The value head in a train backend: its own group and clip, saved beside the policy, and nowhere in what leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.toy import ToyBundle
from tests.train.ranks import run_ranks
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.config.errors import CheckpointError, ConfigError
from unirl.config.load import load
from unirl.distributed import current
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.plan.preflight import preflight
from unirl.testing.toy import toy_track
from unirl.train.backend.base import LrSchedulerConfig, OptimizerConfig
from unirl.train.backend.fsdp import VALUE_HEAD, FSDPBackend
from unirl.train.configs import EmaFullConfig, FSDPConfig, LoraConfig, ValueConfig
from unirl.train.stack import TrainStack, merge_ranks
from unirl.types.results import Metric, TrainStepResult, values
from unirl.types.rollout_resp import RolloutTrack

PPO = DiffusionPPO(clip_range=0.1, outcome="rewards")


class Setup:
    """A stack over a toy whose loss needs a value head, unless another loss is given."""

    def __init__(
        self, algorithm: DiffusionGRPO = PPO, lora: bool = False, micro_batch_size: int = 4, **options: Any
    ) -> None:
        self.bundle = ToyBundle(width=18, blocks=2, meta_init=options.pop("meta_init", False))
        num_updates = self.num_updates = options.pop("num_updates", 1)
        self.prompts = options.pop("prompts", 4)
        settings: dict[str, Any] = {
            "optimizer_cfg": OptimizerConfig(learning_rate=1e-3, weight_decay=0.1),
            "value_cfg": ValueConfig(learning_rate=1e-2, width=6, weight_decay=0.01),
            "fsdp_cfg": FSDPConfig(reduce_dtype="fp64"),
        }
        lora_cfg = LoraConfig(rank=3) if lora else None
        self.backend = FSDPBackend(self.bundle, seed=3, lora_cfg=lora_cfg, **(settings | options))
        self.stage = self.bundle.stage()
        self.stack = TrainStack(
            self.backend,
            algorithm,
            self.stage,
            micro_batch_size=micro_batch_size,
            num_updates_per_batch=num_updates,
        )

    @property
    def head(self) -> nn.Module:
        assert self.backend.value_head is not None
        return self.backend.value_head

    def track(self, step: int = 0) -> RolloutTrack:
        """All rows, sampled by every rank; this one's share of them."""
        with self.backend.sampling():
            track = toy_track(self.stage, prompts=self.prompts, step=step)
        rank, per_update = current(), len(track) // self.num_updates
        size = per_update // rank.dp_size
        starts = [u * per_update + rank.dp_rank * size for u in range(self.num_updates)]
        return RolloutTrack.concat([track.slice(start, start + size) for start in starts])

    def train(self, first: int, last: int) -> list[TrainStepResult]:
        return [light(self.stack.train_track(self.track(step))) for step in range(first, last)]

    def state(self) -> dict[str, Tensor]:
        """Every tensor that changes, whole, by name."""
        backend, result = self.backend, {}
        for layout in backend.layouts:
            for name, shard in layout.shards.items():
                parts = {"": shard.detach()} | {k: backend.optimizer.state[shard][k] for k in ("exp_avg", "exp_avg_sq")}
                for key, tensor in parts.items():
                    result[f"{name} {key}"] = layout.whole(layout.trainable[name], tensor).clone()
        for snapshot in backend.snapshots.stored:
            result |= {f"{snapshot} {name}": tensor for name, tensor in backend.gather(snapshot).items()}
        return result


def light(result: TrainStepResult) -> TrainStepResult:
    """Its tensors as numbers."""
    return TrainStepResult(
        tuple(
            {n: Metric(float(m.total), float(m.weight), m.kind, float(m.squares)) for n, m in update.items()}
            for update in result.updates
        )
    )


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not np.array_equal(a[name], b[name])]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# Who has one


def test_a_loss_without_a_critic_leaves_no_trace_of_a_value_head(tmp_path: Path) -> None:
    setup = Setup(DiffusionGRPO())
    (result,) = setup.train(0, 1)
    assert setup.backend.value_head is None and setup.stage.value_head is None
    assert len(setup.backend.optimizer.param_groups) == len(setup.backend.layouts) == 1
    assert not [name for name in result.metrics if "value" in name]
    setup.backend.save(str(tmp_path))
    files = {"backend.json", "weights.safetensors", "optimizer.safetensors", "snapshots.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_the_policy_learns_as_without_a_critic_while_the_head_says_zero() -> None:
    plain, critic = Setup(DiffusionGRPO(clip_range=0.1)), Setup(DiffusionPPO(clip_range=0.1, lam=1.0))
    for setup in (plain, critic):
        setup.train(0, 1)
    assert differing(weights_of(plain.backend.module), weights_of(critic.backend.module)) == []


def test_a_second_stack_on_a_backend_trains_the_same_head() -> None:
    setup = Setup()
    TrainStack(setup.backend, PPO, setup.stage)
    assert setup.stage.value_head is setup.head and len(setup.backend.optimizer.param_groups) == 2


@pytest.mark.parametrize("key", ["learning_rate", "max_grad_norm", "weight_decay", "width"])
def test_settings_out_of_range_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"value_cfg\.{key}"):
        ValueConfig(**{key: -1})


class HeadlessBackend(FSDPBackend):
    """A backend whose constructor has no `value_cfg`, so that it offers no value head."""

    def __init__(self, bundle: Any, *, optimizer_cfg: OptimizerConfig, lora_cfg: LoraConfig | None = None) -> None:
        super().__init__(bundle, optimizer_cfg=optimizer_cfg, lora_cfg=lora_cfg)


RECIPE = "diffusion/sd3_trainside"
WITH_CRITIC = "algorithm._target_=unirl.algorithms.diffusion_ppo.DiffusionPPO"


def test_a_backend_that_has_no_value_head_is_refused_before_anything_loads() -> None:
    backend = [f"backend._target_={__name__}.HeadlessBackend", "backend.optimizer_cfg={learning_rate: 1e-4}"]
    with pytest.raises(
        ConfigError, match=r"DiffusionPPO trains a value head, and HeadlessBackend has none.*FSDPBackend"
    ):
        preflight(load(RECIPE, [WITH_CRITIC, "plugins=[tests]", *backend]))


def test_settings_of_a_head_that_nobody_trains_are_said_to_have_no_effect() -> None:
    settings = "backend.value_cfg={learning_rate: 2e-3}"
    (said,) = preflight(load(RECIPE, [settings])).notices
    assert said == "backend.value_cfg has no effect: DiffusionGRPO trains no value head"
    assert preflight(load(RECIPE, [settings, WITH_CRITIC])).notices == ()


# Its own group


@pytest.mark.parametrize("reduce_dtype", ["fp32", "fp64"])
def test_the_head_steps_as_adamw_with_its_own_rate_decay_and_clip(reduce_dtype: Any) -> None:
    limit = 1e-3
    config = ValueConfig(learning_rate=1e-2, width=6, weight_decay=0.3, max_grad_norm=limit)
    setup = Setup(fsdp_cfg=FSDPConfig(reduce_dtype=reduce_dtype), value_cfg=config)
    twin = Setup()
    optimizer = torch.optim.AdamW(twin.head.parameters(), lr=1e-2, weight_decay=0.3, foreach=False, fused=False)
    for step in range(3):
        track = setup.track(step)
        twin.backend.module.load_state_dict(setup.backend.module.state_dict())
        (update,) = setup.stack.train_track(track).updates
        norm = float(nn.utils.clip_grad_norm_(head_gradient(twin, track), limit))
        assert norm > limit and values(update)["train/value_grad_norm"] == pytest.approx(norm, rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for have, want in zip(setup.head.parameters(), twin.head.parameters(), strict=True):
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-6)


def head_gradient(setup: Setup, track: RolloutTrack) -> list[nn.Parameter]:
    """The head's parameters with the gradient of the mean loss over all rows at once."""
    loss = sum(PPO.loss(setup.stage, track, part).loss for part in PPO.parts(track.segment)) / PPO.count(track)
    gradients = torch.autograd.grad(loss, list(setup.head.parameters()))
    for parameter, gradient in zip(setup.head.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return list(setup.head.parameters())


def test_neither_group_feels_the_other() -> None:
    """The policy's weights do not depend on how the head is trained, nor does its reported norm."""
    one = Setup(value_cfg=ValueConfig(width=6, learning_rate=1e-2, max_grad_norm=1e-4))
    other = Setup(value_cfg=ValueConfig(width=6, learning_rate=0.5, max_grad_norm=1e4))
    (a,), (b,) = one.train(0, 1), other.train(0, 1)
    assert differing(weights_of(one.backend.module), weights_of(other.backend.module)) == []
    assert differing(weights_of(one.head), weights_of(other.head)) != []
    norms = [values(result.metrics)["train/grad_norm"] for result in (a, b)]
    assert norms[0] == norms[1] != values(a.metrics)["train/value_grad_norm"]


def test_the_schedule_is_the_policys_and_the_head_learns_at_its_constant_rate() -> None:
    setup = Setup(scheduler_cfg=LrSchedulerConfig(warmup_updates=10))
    before = weights_of(setup.head)["output_layer.bias"], weights_of(setup.backend.module)["output_layer.bias"]
    (result,) = setup.train(0, 1)
    assert [group["lr"] for group in setup.backend.optimizer.param_groups] == [1e-4, 1e-2]
    assert values(result.metrics)["train/lr"] == 1e-4
    head, policy = weights_of(setup.head)["output_layer.bias"], weights_of(setup.backend.module)["output_layer.bias"]
    assert float((head - before[0]).abs()) == pytest.approx(1e-2, rel=1e-3)  # Adam's first step is its rate
    assert float((policy - before[1]).abs().median()) == pytest.approx(1e-4, rel=1e-2)


def test_a_gradient_of_the_head_that_is_not_finite_skips_the_update_and_is_named() -> None:
    setup = Setup()
    setup.train(0, 1)
    before = setup.state()
    PPO.compute_loss_and_backward(setup.stage, setup.track(), setup.backend.backward)
    assert setup.head.output_layer.weight.grad is not None
    setup.head.output_layer.weight.grad[0, 1] = torch.nan
    stats = setup.backend.step(1.0, torch.zeros(()))
    assert (stats.skipped, stats.culprit) == (True, f"{VALUE_HEAD}.output_layer.weight")
    assert differing(setup.state(), before) == []
    assert all(p.grad is None for p in setup.head.parameters())


# What leaves


def sent(setup: Setup, merged: bool) -> dict[str, Any]:
    layout = WeightSender(setup.backend, setup.stage).prepare(merge_adapters=merged)
    return {name: (info.shape, info.dtype) for name, info in layout.tensors.items()}


@pytest.mark.parametrize(("lora", "payload"), [(True, "adapter"), (True, "merged"), (False, "full")])
def test_nothing_that_is_gathered_sent_or_exported_holds_the_head(lora: bool, payload: Any) -> None:
    with_head, without = Setup(lora=lora), Setup(DiffusionGRPO(), lora=lora)
    with_head.train(0, 1)
    for setup in (with_head, without):
        setup.backend.snapshot("reference")
    a, b = with_head.backend, without.backend
    assert list(a.trainable) == list(b.trainable) and a.adapter_spec() == b.adapter_spec()
    assert [n for n, _ in a.module.named_parameters()] == [n for n, _ in b.module.named_parameters()]
    for weights in ("live", "reference"):
        assert list(a.gather(weights)) == list(b.gather(weights))
        assert [n for n, _ in a.named_tensors(payload, weights)] == [n for n, _ in b.named_tensors(payload, weights)]
    assert sent(with_head, payload == "merged") == sent(without, payload == "merged")


def test_a_snapshot_swaps_the_policy_and_leaves_the_head() -> None:
    setup = Setup(ema_cfg=EmaFullConfig(every=1))
    setup.backend.snapshot("reference")
    setup.train(0, 1)
    live = weights_of(setup.head)
    with torch.no_grad(), setup.backend.weights("reference"):
        assert differing(weights_of(setup.head), live) == []
    assert all(set(held) == set(setup.backend.trainable) for held in setup.backend.snapshots.stored.values())


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("reduce_dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_with_a_value_head_resumes_bit_for_bit(lora: bool, reduce_dtype: Any, tmp_path: Path) -> None:
    options = {"fsdp_cfg": FSDPConfig(reduce_dtype=reduce_dtype), "ema_cfg": EmaFullConfig(every=1), "num_updates": 2}
    unbroken = Setup(lora=lora, **options)
    unbroken.train(0, 2)
    unbroken.backend.save(str(tmp_path))
    resumed = Setup(lora=lora, **options)
    resumed.backend.load(str(tmp_path))
    assert differing(resumed.state(), unbroken.state()) == []
    first, second = unbroken.train(2, 4), resumed.train(2, 4)
    assert differing(resumed.state(), unbroken.state()) == [] and first == second
    assert unbroken.head.output_layer.weight.abs().sum() > 0


def test_a_checkpoint_before_the_first_update_loads(tmp_path: Path) -> None:
    Setup().backend.save(str(tmp_path))
    other = Setup()
    with torch.no_grad():
        other.head.output_layer.weight.fill_(1.0)
    other.backend.load(str(tmp_path))
    assert torch.equal(other.head.output_layer.weight, torch.zeros_like(other.head.output_layer.weight))
    assert other.backend.checkpoint_bytes() - 3 * sum(p.numel() * 4 for p in other.head.parameters()) == (
        Setup(DiffusionGRPO()).backend.checkpoint_bytes()
    )


@pytest.mark.parametrize(("saved", "loaded"), [(PPO, DiffusionGRPO()), (DiffusionGRPO(), PPO)])
def test_a_checkpoint_with_or_without_a_head_is_refused_by_the_other_recipe(
    saved: DiffusionGRPO, loaded: DiffusionGRPO, tmp_path: Path
) -> None:
    Setup(saved).backend.save(str(tmp_path))
    other = Setup(loaded)
    before = weights_of(other.backend.module)
    with pytest.raises(CheckpointError, match=r"value head .*value_head\.") as raised:
        other.backend.load(str(tmp_path))
    assert raised.value.code == 7002 and differing(weights_of(other.backend.module), before) == []


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_policy_is_read_without_its_head_and_optimizer(lora: bool, tmp_path: Path) -> None:
    """As exporting does, which builds no stack and so has neither head nor reference."""
    trained = Setup(DiffusionPPO(clip_range=0.1, kl_coef=0.1), lora=lora, ema_cfg=EmaFullConfig(every=1))
    trained.train(0, 1)
    trained.backend.save(str(tmp_path))
    bundle = ToyBundle(width=18, blocks=2, init_seed=5)
    reader = FSDPBackend(
        bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1.0),
        lora_cfg=LoraConfig(rank=3) if lora else None,
        ema_cfg=EmaFullConfig(),
    )
    reader.load_policy(str(tmp_path))
    assert tuple(reader.snapshots.stored) == ("ema", "reference") and reader.updates == 1
    for weights in ("live", "ema", "reference"):
        assert differing(dict(reader.gather(weights)), dict(trained.backend.gather(weights))) == []
    assert reader.value_head is None and not reader.optimizer.state


# Where the policy is


def test_a_policy_that_was_built_without_storage_gets_the_same_head() -> None:
    loaded, deferred = Setup(lora=True), Setup(lora=True, meta_init=True)
    for setup in (loaded, deferred):
        setup.train(0, 2)
    assert differing(loaded.state(), deferred.state()) == []


def test_it_leaves_the_device_with_the_policy() -> None:
    setup = Setup()
    setup.train(0, 1)
    setup.backend.device = torch.device("meta")
    setup.backend._move(["policy"], torch.device("meta"))
    assert {p.device.type for p in setup.head.parameters()} == {"meta"}


# Several ranks


def train_on_ranks(lora: bool, options: dict[str, Any], folder: str, first: int, last: int) -> dict[str, Any]:
    config = FSDPConfig(**{"reduce_dtype": "fp64"} | options)
    setup = Setup(lora=lora, fsdp_cfg=config, num_updates=2, prompts=8)  # on 4 ranks still 4 rows in a micro-batch
    if first:
        setup.backend.load(f"{folder}/{first}")
    results = setup.train(first, last)
    setup.backend.save(f"{folder}/{last}")
    return {"state": setup.state(), "results": results, "payload": sorted(n for n, _ in setup.backend.gather().items())}


def merged(ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [values(merge_ranks(results).metrics) for results in zip(*(rank["results"] for rank in ranks), strict=True)]


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_two_ranks_train_the_head_to_the_bits_of_one_and_resume_on_one(lora: bool, tmp_path: Path) -> None:
    alone = run_ranks(1, train_on_ranks, lora, {}, str(tmp_path / "one"), 0, 3)
    both = run_ranks(2, train_on_ranks, lora, {}, str(tmp_path / "two"), 0, 3)
    assert differing(alone[0]["state"], both[0]["state"]) == [] == differing(alone[0]["state"], both[1]["state"])
    assert merged(both) == merged(alone) and both[0]["payload"] == alone[0]["payload"]
    assert any(name.startswith(VALUE_HEAD) for name in alone[0]["state"])
    assert np.abs(alone[0]["state"][f"{VALUE_HEAD}.output_layer.weight "]).sum() > 0
    longer = run_ranks(1, train_on_ranks, lora, {}, str(tmp_path / "one"), 3, 4)
    onward = run_ranks(1, train_on_ranks, lora, {}, str(tmp_path / "two"), 3, 4)
    assert differing(longer[0]["state"], onward[0]["state"]) == []


LAYOUTS = [
    (4, {"shard_size": 2}),
    (2, {"shard_size": 1}),
    (2, {"reshard_after_forward": False}),
    (2, {"reduce_dtype": "fp32"}),
    (2, {"reduce_dtype": "fp32", "defer_grad_sync": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num", "options"), LAYOUTS)
def test_how_the_ranks_share_the_weights_does_not_matter(num: int, options: dict[str, Any], tmp_path: Path) -> None:
    plain = {key: value for key, value in options.items() if key == "reduce_dtype"}
    alone = run_ranks(1, train_on_ranks, False, plain, str(tmp_path / "one"), 0, 1)[0]["state"]
    for rank in run_ranks(num, train_on_ranks, False, options, str(tmp_path / "many"), 0, 1):
        if plain:
            assert all(np.allclose(rank["state"][n], alone[n], rtol=1e-3, atol=1e-5) for n in alone)
        else:
            assert differing(rank["state"], alone) == []
