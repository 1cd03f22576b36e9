"""The quick start learns through a real server of transformers as it does with the trained weights themselves."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

STEPS = 8
SHORT = (
    f"num_rollouts={STEPS}",
    f"evaluation.eval_steps={STEPS}",
    "backend.optimizer_cfg.learning_rate=6e-4",  # twice the recipe's: fewer steps do not learn beyond the noise
    "tracking.sample_steps=0",
    "save_interval=0",
)


def scores(folder: Path, *overrides: str) -> list[tuple[float, float]]:
    """Mean held-out reward and its standard error, before the first step and after the last one."""
    loaded = load("llm/quickstart", [*SHORT, *overrides, f"run.dir={folder}"])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    with (folder / "eval_metrics.csv").open() as file:
        return [(float(row["eval/reward_mean"]), float(row["eval/reward_stderr"])) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_the_quick_start_learns_through_transformers_serve_as_it_does_trainside(tmp_path) -> None:
    """Held-out rewards rise by more than two standard errors, and end within three of those of trainside.

    Every step samples from the weights of the step before it, which the server has under their version.
    """
    trainside, server = (scores(tmp_path / name, f"rollout={name}") for name in ("trainside", "server"))
    for (start, _), (end, error) in (trainside, server):
        assert end - start > 2 * error
    (ours, our_error), (theirs, their_error) = server[-1], trainside[-1]
    assert abs(ours - theirs) < 3 * math.hypot(our_error, their_error)
    steps = metrics_of(tmp_path / "server")
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert all(step["sync/bytes"] > 0 for step in steps)
