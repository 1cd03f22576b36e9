"""The quick start learns through a real server of transformers as it does with the trained weights themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.run_files import metrics_of
from unirl.cli.main import main
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

STEPS = 8
SHORT = (
    f"num_rollouts={STEPS}",
    "evaluation.eval_steps=0",  # the server answers for the training alone
    "backend.optimizer_cfg.learning_rate=6e-4",  # twice the recipe's: fewer steps do not learn beyond the noise
    "tracking.sample_steps=0",
    "save_interval=0",
)


def trained(folder: Path, rollout: str) -> Path:
    """The folder of a run that an engine sampled for."""
    loaded = load("llm/quickstart", [*SHORT, f"rollout={rollout}", f"run.dir={folder}"])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    return folder


def held_out(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> dict[str, Any]:
    """The scores of the trained weights, sampled trainside."""
    capsys.readouterr()
    assert main(["eval", str(run), "rollout=trainside", *options, "--json", "--out", str(run / "evaluated")]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_quick_start_learns_through_transformers_serve_as_it_does_trainside(tmp_path, capsys) -> None:
    """Held-out rewards rise by more than two standard errors, and end within three of those of trainside.

    Every step samples from the weights of the step before it, which the server has under their version.
    """
    trainside = held_out(capsys, trained(tmp_path / "trainside", "trainside"), "--baseline")
    server = held_out(capsys, trained(tmp_path / "server", "server"))
    reward, error = "eval/reward_mean", "eval/reward_stderr"
    for result in (trainside, server):
        assert result[reward] - trainside["before"][reward] > 2 * result[error]
    assert abs(server[reward] - trainside[reward]) < 3 * math.hypot(server[error], trainside[error])
    steps = metrics_of(tmp_path / "server")
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert all(step["sync/bytes"] > 0 for step in steps)
