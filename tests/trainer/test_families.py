"""Every family's own recipe trains at toy scale, and continues exactly where it was stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts.support_matrix import FAMILIES
from tests.run_files import metrics_of
from unirl.config.errors import Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

pytestmark = pytest.mark.slow
SETTINGS = ("scale=toy", "num_rollouts=2", "evaluation.eval_steps=0", "tracking.sample_steps=1")


def trainer_of(recipe: str, folder: Path):
    result = load(recipe, [*SETTINGS, f"run.dir={folder}"])
    preflight(result)
    return build_trainer(result)


def run(recipe: str, folder: Path, stop: bool = False) -> None:
    with trainer_of(recipe, folder) as trainer:
        if stop:
            trainer.request_stop(signal.SIGTERM)
        trainer.train()


@pytest.mark.parametrize("recipe", [recipe for _, recipe in FAMILIES.values()])
def test_a_stopped_run_continues_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    run(recipe, tmp_path / "whole")
    with pytest.raises(Preempted):
        run(recipe, tmp_path / "stopped", stop=True)
    run(recipe, tmp_path / "stopped")
    rows = metrics_of(tmp_path / "whole")
    assert rows == metrics_of(tmp_path / "stopped")
    assert [row["rollout/parity_absdiff_max"] for row in rows] == [0.0, 0.0]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    weights = "checkpoints/checkpoint-000002/policy/weights.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (tmp_path / "stopped" / weights).read_bytes()
    assert list((tmp_path / "whole" / "samples" / "step-000001").glob("*.webp"))
