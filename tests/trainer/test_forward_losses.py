"""Losses on clean samples in the loop: samples from the snapshot `old`, and pairs of the best and the worst."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.run_files import metrics_of
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.types.protocols import TrainingProgress
from unirl.types.results import TrainStepResult
from unirl.types.rollout_resp import RolloutTrack

REPLICA, TRAINSIDE = "diffusion/sd3_replica_lora_colocate", "diffusion/sd3_trainside"
NFT = (
    "scale=toy",
    "num_rollouts=2",
    "tracking.sample_steps=0",
    "evaluation.eval_steps=1",
    "algorithm._target_=unirl.algorithms.diffusion_nft.DiffusionNFT",
    "sampling.kernel._target_=unirl.sde.kernels.EulerODE",
    "backend.optimizer_cfg.learning_rate=3e-3",
    "backend.ema_lora_cfg={rate: 0.2, ceiling: 0.8}",
)


def trainer_of(folder: Path, recipe: str, *overrides: str) -> AbstractContextManager[Trainer]:
    loaded = load(recipe, [*NFT, f"run.dir={folder}", *overrides])
    preflight(loaded)
    return build_trainer(loaded)


def run(folder: Path, recipe: str, *overrides: str) -> None:
    with trainer_of(folder, recipe, *overrides) as trainer:
        trainer.train()


@pytest.fixture(scope="module")
def trainside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "run"
    run(folder, TRAINSIDE)
    return folder


@pytest.mark.slow
def test_an_engine_of_its_own_gives_the_run_that_trainside_gives(trainside: Path, tmp_path: Path) -> None:
    run(tmp_path, REPLICA)
    apart = [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in metrics_of(tmp_path)]
    assert apart == [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in metrics_of(trainside)]
    assert [row["sync/version"] for row in metrics_of(tmp_path)] == [0, 2]  # two updates a step


def test_samples_come_from_the_old_policy_and_its_distance_is_seen(trainside: Path) -> None:
    rows = metrics_of(trainside)
    assert [row["sync/version"] for row in rows] == [0, 2]
    assert all(row["train/velocity_mse_old"] > 0 for row in rows)
    assert "rollout/parity_absdiff_max" not in rows[0]  # no log-prob is compared


def test_the_samples_of_a_step_are_those_of_the_snapshot(tmp_path: Path) -> None:
    with trainer_of(tmp_path, TRAINSIDE, "evaluation.eval_steps=0") as trainer:
        trainer.train()
        req = trainer.requests.training(trainer.data.take(2), 9, trainer.publish(9))
        assert req.weights == "old"

        def pixels(weights: str) -> torch.Tensor:
            trainer.policy.roles.sync.push(trainer.policy.version, weights)
            resp = trainer.rollout.generate(req.from_weights(weights, req.weight_version))
            return trainer.rollout.preview(resp.tracks[trainer.track].decoded).pixels

        old, live = pixels("old"), pixels("live")
        report = trainer.publish(9)["image"]
        assert (report.weights, report.version) == ("old", trainer.policy.version)
        assert torch.equal(pixels(report.weights), old) and not torch.equal(old, live)


@pytest.mark.slow
def test_a_run_that_stops_resumes_exactly(trainside: Path, tmp_path: Path) -> None:
    run(tmp_path, TRAINSIDE, "num_rollouts=1")
    run(tmp_path, TRAINSIDE)
    assert metrics_of(tmp_path) == metrics_of(trainside)
    final = "checkpoints/checkpoint-000002/policy/snapshots.safetensors"
    assert (tmp_path / final).read_bytes() == (trainside / final).read_bytes()


def test_online_preferences_train_the_best_and_the_worst_of_each_group(tmp_path: Path) -> None:
    dpo = ("algorithm._target_=unirl.algorithms.diffusion_dpo.DiffusionDPO", "backend.ema_lora_cfg=null")
    one = ("stack.num_updates_per_batch=1", "stack.micro_batch_size=2", "num_rollouts=1", "evaluation.eval_steps=0")
    with trainer_of(tmp_path, TRAINSIDE, *dpo, *one) as trainer:
        trained: list[RolloutTrack] = []
        learn = trainer.policy.roles.stack.train_track

        def watch(track: RolloutTrack, now: TrainingProgress, shown: Collection[str]) -> TrainStepResult:
            trained.append(track)
            return learn(track, now, shown)

        trainer.policy.roles.stack.methods["train_track"] = watch
        trainer.train()
    (track,) = trained
    assert len(track) == 2 * 2 and track.group_ids[0::2] == track.group_ids[1::2]  # of 2 groups of 4
    assert (track.rewards[0::2] > track.rewards[1::2]).all()
    (row,) = metrics_of(tmp_path)
    assert row["train/loss"] == pytest.approx(math.log(2), rel=1e-6)  # the policy is still the reference
    assert row["train/preference_margin"] == 0.0 and row["sync/version"] == 0
    ledger = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert (ledger["generated"], ledger["scored"], ledger["dropped"]) == (8, 8, 0)
