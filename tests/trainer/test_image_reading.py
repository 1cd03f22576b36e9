"""Runs of a unified model on images in prompts: answers about them, and edits of them, also with a second engine."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.errors import UniRLError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

ANSWERS, EDITS = "unified_model/hi3_i2t", "unified_model/hi3_it2i"
COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=1", "evaluation.eval_steps=0", "save_interval=1")
LENGTH = (
    "reward.backend={_target_: unirl.reward.local.length.LengthRewardScorer, config: {truncated: soft, buffer: 8}, "
    "scorer: {_target_: unirl.reward.local.mc_exact_match.MCExactMatchRewardScorer}}"
)
"""A reward that differs between the answers of a toy, none of which is right: shorter ones lose less."""
ENGINE = (
    "rollout={_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}",
    "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}",
)


@contextmanager
def trainer_of(recipe: str, folder: Path, *overrides: str):
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        yield trainer


def run(recipe: str, folder: Path, *overrides: str) -> list[dict]:
    with trainer_of(recipe, folder, *overrides) as trainer:
        trainer.train()
    return metrics_of(folder)


def weights_of(folder: Path, step: int = 2) -> bytes:
    return (folder / f"checkpoints/checkpoint-{step:06d}/policy/weights.safetensors").read_bytes()


@pytest.mark.parametrize(("recipe", "further"), [(ANSWERS, (LENGTH,)), (EDITS, ())], ids=["i2t", "it2i"])
def test_an_engine_with_weights_of_its_own_samples_the_same_bits(recipe: str, further, tmp_path: Path) -> None:
    """Its canary passes, which the policy of images answers on both sides, whatever is trained."""
    alone = run(recipe, tmp_path / "alone", *further)
    assert alone[0]["train/grad_norm"] > 0 and alone[0]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert weights_of(tmp_path / "alone", 1) != weights_of(tmp_path / "alone", 2)
    rows = run(recipe, tmp_path / "engine", *further, *ENGINE)
    for found, expected in zip(rows, alone, strict=True):
        assert found["sync/bytes"] > 0 == found["sync/canary_absdiff"]
        same = [name for name in expected if name.startswith(("rollout/", "train/")) and "parity" not in name]
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert weights_of(tmp_path / "engine") == weights_of(tmp_path / "alone")


def test_the_samples_name_their_images(tmp_path: Path) -> None:
    run(EDITS, tmp_path, "num_rollouts=1")
    manifest = (tmp_path / "samples/step-000001/manifest.jsonl").read_text().splitlines()
    assert all('.png"' in line for line in manifest)


def test_answers_without_images_are_a_mode_of_the_model_without_a_tower(tmp_path: Path) -> None:
    rows = run("unified_model/hi3_t2t", tmp_path, LENGTH.replace("mc_exact_match.MC", "exact_match."))
    assert rows[0]["train/grad_norm"] > 0 and rows[0]["rollout/response_len_mean"] > 0


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (ANSWERS, ["reward.backend={_target_: unirl.reward.local.pickscore.PickScoreRewardScorer}"], "makes text"),
        (EDITS, [LENGTH], "scores text, and HunyuanImage3VisionPipeline makes image"),
        (ANSWERS, ["trainer={_target_: unirl.trainer.unified_model.UnifiedModelTrainer}"], "makes image"),
    ],
)
def test_a_reward_of_the_other_mode_is_refused_by_name(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UniRLError, match=message):
        preflight(load(recipe, overrides))
