"""Sharded training: one, two and four ranks, sharded, replicated or both, are one and the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.toy import ToyBundle, ToyPipeline
from tests.train.ranks import fsdp_events, run_ranks
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.sde.kernels import EulerODE
from unirl.testing.toy import toy_params, toy_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.sharding import chains_of
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, FSDPConfig, LoraConfig
from unirl.train.stack import TrainStack, merge_ranks
from unirl.types.results import Metric, TrainStepResult, values
from unirl.types.rollout_resp import RolloutTrack

NUM_ROWS = 16
SNAPSHOTS = ("live", "ema", "old")


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is sharded."""

    model: str = "toy"
    lora: bool = True
    fsdp: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    updates_per_batch: int = 1

    def bundle(self) -> DiffusionBundle:
        if self.model == "toy":
            return ToyBundle(width=18, blocks=3)  # 18 rows on 4 ranks: 5, 5, 5, 3
        from unirl.models.sd3.family import SD3Bundle

        return SD3Bundle(path="toy", dtype="fp32")

    def backend(self, bundle: DiffusionBundle) -> FSDPBackend:
        return FSDPBackend(
            bundle,
            optimizer_cfg=OptimizerConfig(learning_rate=1e-3, weight_decay=0.01),
            lora_cfg=LoraConfig(rank=4, alpha=8.0) if self.lora else None,
            fsdp_cfg=FSDPConfig(**self.fsdp),
            ema_cfg=EmaFullConfig(every=1, target_decay=0.5),
            ema_lora_cfg=EmaLoraConfig(rate=0.25),
        )


def rollout(case: Case, bundle: DiffusionBundle, backend: FSDPBackend) -> RolloutTrack:
    """All ranks sample all rows, so that each can take its share."""
    side = 4 if case.model == "toy" else 32
    if case.model == "toy":
        pipeline: Any = ToyPipeline(bundle)
    else:
        from unirl.models.sd3.family import SD3Pipeline

        pipeline = SD3Pipeline(bundle)
    params = toy_params(height=side, width=side)
    with backend.sampling():
        track = pipeline.generate(toy_request(NUM_ROWS // 4, params), 8).tracks["image"]
    rewards = -track.segment.final.float().square().flatten(1).mean(1)
    return track.replace(rewards=rewards, component_rewards={"small": rewards}, advantages=rewards - rewards.mean())


def share(track: RolloutTrack, num_updates: int) -> RolloutTrack:
    """This rank's rows: its share of every update."""
    rank, per_update = current(), NUM_ROWS // num_updates
    piece = per_update // rank.dp_size
    starts = [u * per_update + rank.dp_rank * piece for u in range(num_updates)]
    return RolloutTrack.concat([track.slice(start, start + piece) for start in starts])


def train(case: Case) -> dict[str, Any]:
    """Everything that must be equal after some updates."""
    bundle = case.bundle()
    backend = case.backend(bundle)
    stack = TrainStack(
        backend, DiffusionGRPO(), bundle.stage(), micro_batch_size=4, num_updates_per_batch=case.updates_per_batch
    )
    gradients = caught_gradients(backend)
    track = rollout(case, bundle, backend)
    results = [light(stack.train_track(share(track, case.updates_per_batch))) for _ in range(case.steps)]
    return {
        "results": results,
        "tensors": {f"{name} {key}": tensor for name in SNAPSHOTS for key, tensor in backend.gather(name).items()}
        | {f"gradient {name}": tensor for name, tensor in gradients.items()}
        | {"latents": track.segment.latents},
    }


def caught_gradients(backend: FSDPBackend) -> dict[str, Tensor]:
    """Filled with the whole gradients of every update, on their way into `step`."""
    caught: dict[str, Tensor] = {}
    step = backend.step

    def catching(max_grad_norm: float, loss: Tensor) -> Any:
        for name, shard in backend.shards.items():
            assert shard.grad is not None
            caught[f"{backend.updates} {name}"] = backend.sharding.whole(backend.trainable[name], shard.grad).clone()
        return step(max_grad_norm, loss)

    backend.step = catching  # type: ignore[method-assign]
    return caught


def light(result: TrainStepResult) -> TrainStepResult:
    """Its tensors as numbers."""
    return TrainStepResult(
        tuple(
            {n: Metric(float(m.total), float(m.weight), m.kind, float(m.squares)) for n, m in update.items()}
            for update in result.updates
        )
    )


@dataclass(frozen=True)
class Outcome:
    """What a run gave: metrics per update over all ranks, and tensors by name."""

    metrics: list[dict[str, float]]
    tensors: dict[str, np.ndarray]

    def bits_that_differ(self, other: Outcome) -> list[str]:
        """Names of metrics and tensors that are not equal."""
        result = [name for name, tensor in self.tensors.items() if not np.array_equal(tensor, other.tensors[name])]
        for u, (mine, theirs) in enumerate(zip(self.metrics, other.metrics, strict=True)):
            result += [f"update {u} {name}" for name in mine if mine[name] != theirs[name]]
        return result

    def difference(self, other: Outcome, kind: str) -> float:
        """Over all tensors of a kind: the norm of the difference, relative to the norm."""
        pairs = [(t, other.tensors[name]) for name, t in self.tensors.items() if name.startswith(kind)]
        gap, size = (
            np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in xs))
            for xs in zip(*((a - b, a) for a, b in pairs), strict=True)
        )
        return float(gap / size)


def outcome(num: int, case: Case) -> Outcome:
    """The tensors of rank 0, and the metrics of all ranks."""
    ranks = run_ranks(num, train, case)
    merged = [merge_ranks([rank["results"][i] for rank in ranks]) for i in range(case.steps)]
    return Outcome([values(update) for result in merged for update in result.updates], ranks[0]["tensors"])


@cache
def alone(model: str, lora: bool, options: tuple[tuple[str, Any], ...]) -> Outcome:
    return outcome(1, Case(model, lora, dict(options)))


def case_of(model: str, lora: bool, size: int | None, **options: Any) -> Case:
    return Case(model, lora, {"shard_size": size, **options})


FAST = [(2, None), (4, 2)]
ALL = [(2, None), (2, 1), (4, None), (4, 2), (4, 1)]
CASES = [
    pytest.param(model, *layout, marks=() if (model, layout) in [("toy", each) for each in FAST] else pytest.mark.slow)
    for model, layouts in (("toy", ALL), ("sd3", FAST))
    for layout in layouts
]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("model", "num", "size"), CASES)
def test_several_ranks_equal_one_to_the_bit(model: str, num: int, size: int | None, lora: bool) -> None:
    result = outcome(num, case_of(model, lora, size, reduce_dtype="fp64"))
    assert alone(model, lora, (("reduce_dtype", "fp64"),)).bits_that_differ(result) == []


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model", ["toy", pytest.param("sd3", marks=pytest.mark.slow)])
def test_in_fp32_ranks_agree_to_rounding(model: str, lora: bool) -> None:
    one, four = alone(model, lora, ()), outcome(4, case_of(model, lora, 2))
    assert one.difference(four, "gradient 0") < 1e-6
    assert one.difference(four, "live") < 1e-6
    for mine, theirs in zip(one.metrics, four.metrics, strict=True):
        assert theirs["train/grad_norm"] == pytest.approx(mine["train/grad_norm"], rel=1e-6)
        assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=1e-4, abs=1e-9)


OPTIONS = [
    {"activation_checkpointing": True, "reduce_dtype": "fp64"},
    {"reshard_after_forward": False, "reduce_dtype": "fp64"},
    {"prefetch_blocks": 2, "reduce_dtype": "fp64"},
    {"defer_grad_sync": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["recomputed", "gathered", "ahead", "reduced-at-once"])
def test_how_shards_are_gathered_and_reduced_does_not_matter(options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key == "reduce_dtype"}
    one, two = alone("toy", True, tuple(plain.items())), outcome(2, case_of("toy", True, None, **options))
    if plain:
        assert one.bits_that_differ(two) == []
    assert one.difference(two, "gradient 0") < 1e-6


def test_updates_of_one_batch_are_the_same_rows_for_any_number_of_ranks() -> None:
    one, two = (outcome(num, Case(fsdp={"reduce_dtype": "fp64"}, steps=2, updates_per_batch=2)) for num in (1, 2))
    assert len(one.metrics) == 4 and one.bits_that_differ(two) == []


def reductions(defer: bool) -> int:
    """How often gradients were reduced in a step of 2 micro-batches of 3 parts."""
    case = Case(fsdp={"defer_grad_sync": defer}, steps=1)
    bundle = case.bundle()
    backend = case.backend(bundle)
    stack = TrainStack(backend, DiffusionGRPO(), bundle.stage(), micro_batch_size=4)
    track = rollout(case, bundle, backend)
    with fsdp_events() as events:
        stack.train_track(share(track, 1))
    return sum("post_backward_reduce" in name for name in events)


@pytest.mark.parametrize(("defer", "expected"), [(True, 3), (False, 18)])
def test_gradients_travel_once_an_update_unless_they_do_not_fit(defer: bool, expected: int) -> None:
    assert run_ranks(2, reductions, defer) == [expected, expected]  # 3 blocks carry adapters


def sampled_with_a_step_cache() -> dict[str, Tensor]:
    """Each rank samples its own half of eight rows, or both halves if there is one rank."""
    case = Case()
    bundle = case.bundle()
    backend = case.backend(bundle)
    params = toy_params(num_inference_steps=12, sde_indices=(), kernel=EulerODE(), cache_threshold=0.05)
    request, (rank, count) = toy_request(2, params), (current().dp_rank, current().dp_size)
    halves = [request.slice(0, 4), request.slice(4, 8)] if count == 1 else [request.slice(4 * rank, 4 * rank + 4)]
    with backend.sampling():
        segments = [ToyPipeline(bundle).generate(half, 4).tracks["image"].segment for half in halves]
    skipped = [segment.skipped for segment in segments if segment.skipped is not None]
    return {"final": torch.cat([segment.final for segment in segments]), "skipped": torch.cat(skipped)}


def test_ranks_that_share_weights_leave_out_different_blocks_and_wait_for_no_one() -> None:
    """Sampling gathers the weights once, so blocks that one rank leaves out are no collectives that others miss."""
    [alone], ranks = run_ranks(1, sampled_with_a_step_cache), run_ranks(2, sampled_with_a_step_cache)
    assert len({float(share) for share in alone["skipped"]}) == 2
    for name, tensor in alone.items():
        assert np.array_equal(tensor, np.concatenate([rank[name] for rank in ranks])), name


def prefetches(count: int) -> list[str]:
    """The blocks that were gathered ahead in one forward and backward pass of three blocks, in their order."""
    case = Case(fsdp={"prefetch_blocks": count}, lora=False)
    bundle = case.bundle()
    backend = case.backend(bundle)
    track = rollout(case, bundle, backend)
    with fsdp_events() as events:
        logp = bundle.stage().replay(track.conditions, track.segment, [0]).logp
        backend.backward(logp.sum(), last=True)
    return [name.removeprefix("FSDP::") for name in events if "_prefetch for" in name]


def test_blocks_are_gathered_ahead_in_the_order_in_which_they_run() -> None:
    """Block i asks for those after it, in the backward pass for those before it. There the root asks for block 2."""

    def blocks(result: list[str], direction: str) -> list[int]:
        start = f"{direction}_prefetch for blocks."
        return [int(name.removeprefix(start)) for name in result if name.startswith(start)]

    none, one, two = (run_ranks(2, prefetches, count)[0] for count in (0, 1, 2))
    assert [blocks(result, "forward") for result in (none, one, two)] == [[], [1, 2], [1, 2, 2]]
    assert [blocks(result, "backward") for result in (none, one, two)] == [[2, 1, 0], [2, 1, 0], [2, 1, 0, 0]]


def test_blocks_of_two_experts_do_not_gather_each_other() -> None:
    experts = [torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))) for _ in range(2)]
    blocks = [list(expert) for expert in experts]
    assert chains_of([*blocks[0], *blocks[1], *experts]) == blocks
    assert chains_of([*blocks[0], *blocks[1]]) == [[*blocks[0], *blocks[1]]]


def in_bf16(lora: bool) -> dict[str, Any]:
    """Stable Diffusion 3 in bf16: parity of rollout and replay, and what is stored and gathered in which dtype."""
    from unirl.models.sd3.family import SD3Bundle

    case = Case("sd3", lora, {}, steps=1)
    bundle = SD3Bundle(path="toy", dtype="bf16")
    backend = case.backend(bundle)
    stack = TrainStack(backend, DiffusionGRPO(), bundle.stage(), micro_batch_size=4)
    result = light(stack.train_track(share(rollout(case, bundle, backend), 1)))
    stored = {str(p.dtype) for p in backend.trainable.values()}
    with backend.sampling():
        gathered = {str(p.dtype) for p in backend.module.parameters()}
    return {"metrics": values(result.updates[0]), "stored": sorted(stored), "gathered": sorted(gathered)}


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_masters_are_float32_and_gathered_in_the_models_dtype_and_rollout_equals_replay(lora: bool) -> None:
    for result in run_ranks(2, in_bf16, lora):
        assert (result["stored"], result["gathered"]) == (["torch.float32"], ["torch.bfloat16"])
        assert result["metrics"]["rollout/parity_absdiff_max"] == 0.0
        assert result["metrics"]["train/ratio_mean"] == 1.0 and result["metrics"]["train/skipped_updates"] == 0.0
