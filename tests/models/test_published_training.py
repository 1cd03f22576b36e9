"""Directories with the files of published models train on one and on two ranks, with a replica that gets the weights.

test_published_layouts.py loads, plans and fills the same directories.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.family_cases import CASES
from tests.models.layouts import LANGUAGE_MODELS, LAYOUTS, PIPELINES, bundle_of, case_of, write_repository
from tests.models.test_loaded_dtypes import LORA, trained
from tests.models.texts import prompts_of_lengths, segment_of_lengths
from tests.sync_ends import placed
from tests.train.ranks import run_ranks
from unirl.distributed import current
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.models.language.image_tokens import UNCONDITIONAL, ImageTokenStage
from unirl.models.language.stage import ARStage
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig
from unirl.types.conditions import Conditions
from unirl.types.segments import ImageTokenSegment, TextSegment

ONE_PER_FAMILY = list({LAYOUTS[hub_id]["case"]: hub_id for hub_id in reversed(PIPELINES)}.values())
"""Repositories of one family differ in their files alone, which loading tests."""
PIPELINE_CLASSES = {
    "Qwen3Bundle": "qwen3.family.Qwen3Pipeline",
    "QwenVLBundle": "qwen_vl.family.QwenVLPipeline",
    "JanusProBundle": "janus_pro.family.JanusProPipeline",
}
PROMPTS, RESPONSES = (5, 12, 3, 7), (9, 1, 6, 4)


def trained_text(hub_id: str, folder: str) -> dict[str, Any]:
    """An update on given responses, of which each rank trains its rows, with a replica that gets the weights."""
    bundle_class = bundle_of(hub_id)
    module, name = PIPELINE_CLASSES[bundle_class.__name__].rsplit(".", 1)
    pipeline_class = getattr(importlib.import_module(f"unirl.models.{module}"), name)
    pipeline, other = (pipeline_class(bundle_class(path=folder, dtype="bf16")) for _ in range(2))
    backend = FSDPBackend(
        pipeline.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-3),
        lora_cfg=LORA,
        fsdp_cfg=FSDPConfig(activation_checkpointing=True),
    )
    engine, pool = ReplicaRolloutEngine(other), open_pool("local", 2, deadline_s=600.0)
    sender = WeightSender(backend, pipeline.stage, engine)
    sync = EngineSync(placed(pool, 0, "sender", sender), placed(pool, 1, "rollout", engine))
    canaries = [sync.push(0).canary_absdiff]
    rank = current()
    mine = list(range(rank.dp_rank, len(PROMPTS), rank.dp_size))
    conditions, responses = recorded_rows(pipeline.stage)
    selected = {name: condition.select(mine) for name, condition in conditions.items()}
    logp = pipeline.stage.replay(selected, responses.select(mine)).logp
    loss = -logp.sum() / sum(RESPONSES)
    backend.backward(loss, last=True)
    stats = backend.step(1e9, loss)
    assert stats is not None
    canaries.append(sync.push(1).canary_absdiff)
    with torch.no_grad():
        after = pipeline.stage.replay(conditions, responses).logp
    return {"canaries": canaries, "grad_norm": stats.grad_norm, "loss": loss.item(), "logp": after}


def recorded_rows(stage: ARStage) -> tuple[Conditions, TextSegment]:
    """Prompts and responses of random tokens; for images, entries of the codebook, with guidance."""
    conditions, texts = prompts_of_lengths(PROMPTS), segment_of_lengths(RESPONSES)
    if not isinstance(stage, ImageTokenStage):
        return conditions, texts
    tokens = {"tokens": texts.tokens % stage.facts.vocab_size}
    images = ImageTokenSegment(**vars(texts) | tokens, guidance_scale=3.0)
    return conditions | {UNCONDITIONAL: prompts_of_lengths(PROMPTS, seed=2)["prompt"]}, images


def all_trained(folder: str) -> dict[str, Any]:
    images = {hub_id: trained(case_of(hub_id), f"{folder}/{hub_id}", LORA) for hub_id in ONE_PER_FAMILY}
    return images | {hub_id: trained_text(hub_id, f"{folder}/{hub_id}") for hub_id in LANGUAGE_MODELS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of one process, of the first of two ranks and of the second."""
    folder = tmp_path_factory.mktemp("repositories")
    for hub_id in (*ONE_PER_FAMILY, *LANGUAGE_MODELS):
        write_repository(hub_id, folder / hub_id)
    [alone] = run_ranks(1, all_trained, str(folder))
    return [alone, *run_ranks(2, all_trained, str(folder))]


def test_a_repository_of_every_family_is_trained() -> None:
    assert sorted(case_of(hub_id).name for hub_id in ONE_PER_FAMILY) == sorted(case.name for case in CASES)


@pytest.mark.slow
@pytest.mark.parametrize("hub_id", ONE_PER_FAMILY)
def test_a_published_pipeline_trains_on_two_ranks_as_on_one_and_its_replicas_prove_it(
    results: list[dict[str, Any]], hub_id: str
) -> None:
    alone, first, second = (result[hub_id] for result in results)
    assert np.array_equal(alone["latents"], first["latents"])
    for mine, theirs, others in zip(*(result["metrics"] for result in (alone, first, second)), strict=True):
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4) and mine["grad_norm"] > 0
        assert theirs["loss"] + others["loss"] == pytest.approx(mine["loss"], abs=1e-6)
    assert max(float(np.abs(tensor - first["weights"][key]).max()) for key, tensor in alone["weights"].items()) == 0.0
    assert alone["canaries"] == first["canaries"] == second["canaries"] == [0.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("hub_id", LANGUAGE_MODELS)
def test_a_published_language_model_trains_on_two_ranks_as_on_one_and_its_replicas_prove_it(
    results: list[dict[str, Any]], hub_id: str
) -> None:
    alone, first, second = (result[hub_id] for result in results)
    assert first["loss"] + second["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2) and alone["grad_norm"] > 0
    np.testing.assert_allclose(first["logp"], alone["logp"], atol=0.05)  # bf16
    assert alone["canaries"] == first["canaries"] == second["canaries"] == [0.0, 0.0]
