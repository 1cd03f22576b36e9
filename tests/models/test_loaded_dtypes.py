"""A network has the dtypes in which its library loads it, however it is built and sharded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.family_cases import CASES, FamilyCase, built
from tests.sync_ends import placed
from tests.train.ranks import run_ranks
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.distributed import current
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.loading.dtypes import kept_parameters
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.sde.kernels import FlowSDEStrategy
from unirl.testing.bundle import rollout_of
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.stack import TrainStack
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LORA = LoraConfig(rank=4, alpha=8.0)


def contents(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not saved."""
    return {**dict(module.named_parameters()), **{f"buffer {name}": b for name, b in module.named_buffers()}}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


@cache
def keeps_float32(case: FamilyCase) -> bool:
    """True if a class of the trained module keeps parameters in float32."""
    return bool(kept_parameters(built(case).bundle.trainable(), torch.bfloat16))


def test_the_families_with_float32_parts_are_known() -> None:
    """The tests below that run only for these families do run."""
    assert [case.name for case in CASES if keeps_float32(case)] == [
        "wan21",
        "wan21-i2v",
        "wan22",
        "wan22-i2v",
        "wan22-ti2v",
    ]


@each_family
def test_a_toy_in_bf16_is_what_its_library_loads(case: FamilyCase, tmp_path: Path) -> None:
    family = built(case).bundle.family
    configs = family.toys[case.path]
    for name in configs.components:
        family.random(configs, name, torch.float32).save_pretrained(tmp_path / name)  # type: ignore[operator]
        loaded = family.load(tmp_path, name, torch.bfloat16)
        toy = contents(family.random(configs, name, torch.bfloat16))
        # Gemma converts this scale to the dtype of its weights in each forward.
        toy.pop("buffer embed_tokens.embed_scale", None)
        assert_same(toy, {key: tensor for key, tensor in contents(loaded).items() if key in toy})


@each_family
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_module_without_storage_becomes_the_one_that_is_loaded(
    case: FamilyCase, lora: LoraConfig | None, tmp_path: Path
) -> None:
    folder = built(case).write_model({}, tmp_path)
    bundle_class, _ = case.classes()
    backends = [
        FSDPBackend(
            bundle_class(components=(), path=str(folder), dtype="bf16", meta_init=meta_init),
            optimizer_cfg=OptimizerConfig(learning_rate=1e-3),
            lora_cfg=lora,
        )
        for meta_init in (True, False)
    ]
    assert_same(*(contents(backend.module) for backend in backends))


def test_frozen_weights_are_stored_in_another_dtype_except_the_kept_ones() -> None:
    pipeline = next(case for case in CASES if keeps_float32(case)).build()
    module = pipeline.bundle.trainable()
    kept = kept_parameters(module, torch.bfloat16)
    config = FSDPConfig(param_dtype="bf16")
    FSDPBackend(pipeline.bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=LORA, fsdp_cfg=config)
    wide = {name for name, p in module.named_parameters() if p.dtype == torch.float32 and not p.requires_grad}
    assert wide == kept - {name for name, _ in module.named_buffers()} and wide


def trained(case: FamilyCase, folder: str, lora: LoraConfig | None) -> dict[str, Any]:
    """Two updates on a rollout, of which each rank trains its rows, with a replica that gets the weights each time."""
    bundle_class, pipeline_class = case.classes()
    pipeline, other = (pipeline_class(bundle_class(path=folder, dtype="bf16")) for _ in range(2))
    backend = FSDPBackend(
        pipeline.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-3),
        lora_cfg=lora,
        fsdp_cfg=FSDPConfig(activation_checkpointing=True),
    )
    engine = ReplicaRolloutEngine(other)
    pool = open_pool("local", 2, deadline_s=60.0)
    sender = WeightSender(backend, pipeline.stage, engine)
    sync = EngineSync(placed(pool, 0, "sender", sender), placed(pool, 1, "rollout", engine))
    stack = TrainStack(backend, DiffusionGRPO(clip_range=0.9), pipeline.stage, micro_batch_size=2)
    height, width, frames = case.sizes[0]
    params = DiffusionSamplingParams(
        kernel=FlowSDEStrategy(), num_inference_steps=3, height=height, width=width, num_frames=frames,
        guidance_scale=case.scales[-1], max_sequence_length=case.max_sequence_length,
    )  # fmt: skip
    with backend.sampling():
        track = rollout_of(pipeline, params).slice(0, 4)
    rewards = -track.segment.final.float().square().flatten(1).mean(1)
    track = track.replace(rewards=rewards, component_rewards={"small": rewards}, advantages=rewards - rewards.mean())
    metrics, canaries = [], [sync.push(0).canary_absdiff]
    for update in (1, 2):
        result = stack.train_track(own_rows(track))
        metrics.append({name: result.metrics[f"train/{name}"].value for name in ("loss", "grad_norm")})
        canaries.append(sync.push(update).canary_absdiff)
    return {"metrics": metrics, "canaries": canaries, "latents": track.segment.latents, "weights": backend.gather()}


def own_rows(track: RolloutTrack) -> RolloutTrack:
    """The share of this rank."""
    share = len(track.sample_ids) // current().dp_size
    return track.slice(current().dp_rank * share, (current().dp_rank + 1) * share)


FULLY_TRAINED = ("wan22", "hunyuan_video15")
"""One that keeps parameters in float32, and one whose forward of diffusers is replaced by one on whole batches.

test_published_training.py trains adapters on every family.
"""


def all_trained(folder: str) -> dict[str, Any]:
    cases = {case.name: case for case in CASES}
    return {name: trained(cases[name], f"{folder}/{name}", None) for name in FULLY_TRAINED}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of one process, of the first of two ranks and of the second."""
    folder = tmp_path_factory.mktemp("models")
    for case in CASES:
        if case.name in FULLY_TRAINED:
            built(case).write_model({}, folder / case.name)
    [alone] = run_ranks(1, all_trained, str(folder), deadline_s=600.0)
    return [alone, *run_ranks(2, all_trained, str(folder), deadline_s=600.0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FULLY_TRAINED)
def test_two_ranks_train_a_whole_network_as_one_and_their_replicas_prove_it(
    results: list[dict[str, Any]], name: str
) -> None:
    alone, first, second = (result[name] for result in results)
    # One rank computes the norms of a fully trained network in float32, two ranks in bf16 unless its class keeps them.
    same_norms = name.startswith("wan")
    assert np.array_equal(alone["latents"], first["latents"]) == same_norms
    mine, theirs, others = (result["metrics"][0] for result in (alone, first, second))
    assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4 if same_norms else 1e-2)
    assert mine["grad_norm"] > 0
    assert theirs["loss"] + others["loss"] == pytest.approx(mine["loss"], abs=1e-6)
    largest = max(float(np.abs(tensor - first["weights"][key]).max()) for key, tensor in alone["weights"].items())
    # One rank computes its norms and tables with float32 masters, two ranks and replicas with bf16 copies.
    assert (largest < 2.5e-3 or not same_norms) and first["canaries"] == [0.0, 0.0, 0.0]
    assert max(alone["canaries"]) < 0.05 and (alone["canaries"][0] == 0.0) == same_norms
