"""The recipe of BAGEL: the same run in every layout, on one and two workers, and after a stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.run_files import metrics_of
from tests.trainer.test_runtimes import Outcome, assert_same, one_thread, run
from unirl.config.errors import Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer
from unirl.trainer.unified_model import UnifiedModelTrainer

pytestmark = pytest.mark.slow
RECIPE = "unified_model/bagel_trainside_lora"
REPLICA = (
    "rollout={_target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine}",
    "sync={_target_: unirl.distributed.weight_sync.sync.EngineSync}",
)
GUIDED = ("sampling.guidance_scale=4", "bundle.cfg_renorm_type=channel", "bundle.cfg_interval=[0.2, 1.0]")
"""Guidance in the rollout and in the update, as in the published runs of Flow-GRPO."""
__all__ = ["one_thread"]  # a fixture of all tests here


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The recipe in this process, which all other runs must equal."""
    torch.set_num_threads(1)
    return run(tmp_path_factory.mktemp("local"), RECIPE, *GUIDED)


def test_the_run_trains(local: Outcome) -> None:
    assert not torch.equal(local.logp[0], local.logp[-1])
    assert all("_moe_gen" in name and ".lora_" in name for name in local.weights)


def test_an_engine_with_a_copy_of_the_network_draws_the_same(local: Outcome, tmp_path: Path) -> None:
    assert_same(run(tmp_path, RECIPE, *GUIDED, *REPLICA), local)


def test_two_workers_make_the_same_run(local: Outcome, workers: object, tmp_path: Path) -> None:
    assert_same(run(tmp_path, RECIPE, *GUIDED, "runtime=ray", "num_devices=2"), local)


def test_a_copy_on_a_worker_of_its_own_draws_the_same(local: Outcome, workers: object, tmp_path: Path) -> None:
    settings = ("runtime=ray", "num_devices=2", "placement={train: 0, rollout: 1}")
    assert_same(run(tmp_path, RECIPE, *GUIDED, *REPLICA, *settings), local)


def run_until(folder: Path, *overrides: str, stop: bool = False) -> None:
    common = ("scale=toy", "num_rollouts=2", "evaluation.eval_steps=0", "tracking.sample_steps=1", f"run.dir={folder}")
    recipe = load(RECIPE, [*common, *overrides])
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        assert isinstance(trainer, UnifiedModelTrainer)
        if stop:
            trainer.request_stop(signal.SIGTERM)
        trainer.train()


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_a_stopped_run_continues_bit_for_bit(full: bool, tmp_path: Path) -> None:
    settings = ("backend.lora_cfg=null",) if full else ()
    run_until(tmp_path / "whole", *settings)
    with pytest.raises(Preempted):
        run_until(tmp_path / "stopped", *settings, stop=True)
    run_until(tmp_path / "stopped", *settings)
    rows = metrics_of(tmp_path / "whole")
    assert rows == metrics_of(tmp_path / "stopped")
    assert [row["rollout/parity_absdiff_max"] for row in rows] == [0.0, 0.0]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    weights = "checkpoints/checkpoint-000002/policy/weights.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (tmp_path / "stopped" / weights).read_bytes()
    assert list((tmp_path / "whole" / "samples" / "step-000001").glob("*.webp"))
