"""Sharded training: one, two and four ranks, sharded, replicated or both, are one and the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.train.ranks import run_ranks
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.models.base import DiffusionBundle
from unirl.models.diffusion import DiffusionStage
from unirl.testing.toy import ToyBundle, ToyPipeline, toy_params, toy_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, FSDPConfig, LoraConfig
from unirl.train.stack import TrainStack, merge_ranks
from unirl.types.results import Metric, TrainStepResult, values
from unirl.types.rollout_resp import RolloutTrack

NUM_ROWS = 16


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is sharded."""

    model: str = "toy"
    lora: bool = True
    fsdp: dict[str, Any] = field(default_factory=dict)
    updates: int = 3

    def bundle(self) -> DiffusionBundle:
        if self.model == "toy":
            return ToyBundle(width=18, blocks=3)  # 18 rows on 4 ranks: 5, 5, 5, 3
        from unirl.models.sd3.bundle import SD3Bundle

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
        from unirl.models.sd3.pipeline import SD3Pipeline

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
    stage = DiffusionStage(bundle.denoiser(), bundle.facts, bundle.dtype)
    stack = TrainStack(backend, DiffusionGRPO(), stage, micro_batch_size=4)
    track = rollout(case, bundle, backend)
    results = [light(stack.train_track(share(track, 1))) for _ in range(case.updates)]
    return {
        "results": results,
        "weights": {name: backend.gather(name) for name in ("live", "ema", "old")},
        "latents": track.segment.latents,
    }


def light(result: TrainStepResult) -> TrainStepResult:
    """Its tensors as numbers."""
    return TrainStepResult(
        tuple(
            {n: Metric(float(m.total), float(m.weight), m.kind, float(m.squares)) for n, m in update.items()}
            for update in result.updates
        )
    )


def outcome(num: int, case: Case) -> dict[str, Any]:
    """The weights of rank 0, and the metrics of all ranks."""
    ranks = run_ranks(num, train, case)
    metrics = [values(merge_ranks([rank["results"][u] for rank in ranks]).metrics) for u in range(case.updates)]
    return {"metrics": metrics, "weights": ranks[0]["weights"], "latents": ranks[0]["latents"]}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what is not bit-equal."""
    found = [
        f"{snapshot}:{name}"
        for snapshot, tensors in a["weights"].items()
        for name, tensor in tensors.items()
        if not np.array_equal(tensor, b["weights"][snapshot][name])
    ]
    for u, (left, right) in enumerate(zip(a["metrics"], b["metrics"], strict=True)):
        found += [f"update {u} {name}: {left[name]!r} {right[name]!r}" for name in left if left[name] != right[name]]
    return found + ([] if np.array_equal(a["latents"], b["latents"]) else ["latents"])


LAYOUTS = [(2, None), (2, 1), (4, None), (4, 2), (4, 1)]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_ranks_equal_one_to_the_bit(lora: bool) -> None:
    exact = {"reduce_dtype": "fp64"}
    one = outcome(1, Case(lora=lora, fsdp=exact))
    assert differences(one, outcome(2, Case(lora=lora, fsdp=exact))) == []
