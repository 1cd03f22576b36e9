"""A service that is killed during a run costs it time and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from reward_service.running import RunningService

from tests.processes import is_running, wait_until
from tests.run_files import metrics_of
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

from .conftest import children

COMMON = ("scale=toy", "num_rollouts=3", "tracking.sample_steps=0", "evaluation.eval_steps=0", "save_interval=0")


def run(folder: Path, reward: str) -> None:
    recipe = load("diffusion/sd3_trainside", [*COMMON, f"run.dir={folder}", f"reward.backend={reward}"])
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        trainer.train()


@pytest.mark.slow
def test_a_run_whose_service_is_killed_again_and_again_equals_one_that_scores_locally(tmp_path, python):
    run(tmp_path / "local", "{_target_: unirl.reward.local.image_statistics.BrightnessRewardScorer}")
    reward = {"name": "brightness", "scorer": "brightness", "num_threads": 1, "python": python}
    service = RunningService({"rewards": [reward]})
    killed = []

    def kill_after_steps() -> None:
        file = tmp_path / "remote" / "metrics.jsonl"
        for step in (1, 2):
            if wait_until(lambda step=step: file.exists() and file.read_text().count("\n") >= step, 600):
                pids = children(service.pid)
                service.kill()
                killed.append(step)
                assert wait_until(lambda pids=pids: not any(map(is_running, pids)), 60)
                service.start()

    with service:
        config = f"{{base_url: '{service.url}', required_rewards: [brightness], batch_size: 3, retry_delay: 0.05}}"
        killer = threading.Thread(target=kill_after_steps)
        killer.start()
        run(tmp_path / "remote", f"{{_target_: unirl.reward.remote.RemoteRewardBackend, config: {config}}}")
        killer.join()
    assert killed == [1, 2]
    assert metrics_of(tmp_path / "remote") == metrics_of(tmp_path / "local")
