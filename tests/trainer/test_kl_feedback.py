"""Feedback on the KL coefficient: from the logged divergence to the next step's loss, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.algorithms.shared.kl import AdaptiveKL
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

COEF, RULE = 0.5, AdaptiveKL(target=1e-9, horizon=20.0)


def run(folder: Path, num_rollouts: int, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a toy run whose first update already moves away from the reference."""
    settings = (
        "scale=toy",
        f"num_rollouts={num_rollouts}",
        f"run.dir={folder}",
        "tracking.sample_steps=0",
        "evaluation.eval_steps=0",
        "save_interval=1",
        f"algorithm.kl_coef={COEF}",
        f"algorithm.kl_adaptive={{target: {RULE.target}, horizon: {RULE.horizon}}}",
    )
    recipe = load("diffusion/sd3_trainside", [*settings, *overrides])
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        trainer.train()
    return metrics_of(folder)


def test_the_coefficient_of_a_step_follows_the_divergence_of_the_one_before(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2)
    assert first["train/kl_coef"] == COEF and first["train/kl"] > 0
    factor = RULE.factor(first["train/kl"], first["samples/scored"])
    assert second["train/kl_coef"] == pytest.approx(COEF * factor, rel=1e-6) and factor != 1.0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_coefficient_that_was_reached(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2)
    run(tmp_path / "cut", 1)
    assert run(tmp_path / "cut", 2, "resume=auto") == whole
