"""The loop with an engine of its own: evaluations, publications at intervals, and the gate before the first update."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.run_files import metrics_of
from unirl.config.errors import DivergenceError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer

COMMON = ("scale=toy", "tracking.sample_steps=0", "evaluation.eval_steps=0", "backend.optimizer_cfg.learning_rate=3e-3")
COLOCATE, SEPARATE = "diffusion/sd3_replica_lora_colocate", "diffusion/sd3_replica_lora_separate"


def run(folder: Path, recipe: str, *overrides: str):
    loaded = load(recipe, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(loaded)
    with build_trainer(loaded) as trainer:
        trainer.train()
    return trainer


def evaluations_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "eval_metrics.csv") as file:
        return list(csv.DictReader(file))


def evaluated(folder: Path, recipe: str, weights: str) -> list[dict[str, str]]:
    settings = ("num_rollouts=2", "evaluation.eval_steps=1", "backend.ema_cfg={every: 1}")
    run(folder, recipe, *settings, f"evaluation.weights={weights}")
    return evaluations_of(folder)


@pytest.fixture(scope="module", params=["live", "ema"])
def of_trainside(request, tmp_path_factory) -> tuple[str, list[dict[str, str]]]:
    """Which weights are evaluated, and what trainside finds."""
    return request.param, evaluated(tmp_path_factory.mktemp("trainside"), "diffusion/sd3_trainside", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [COLOCATE, SEPARATE])
def test_evaluations_of_live_and_averaged_weights_equal_those_of_trainside(recipe, of_trainside, tmp_path) -> None:
    weights, expected = of_trainside
    assert len(expected) == 3 and evaluated(tmp_path, recipe, weights) == expected


def test_weights_that_are_published_every_second_step_are_one_step_old_in_between(tmp_path) -> None:
    run(tmp_path, SEPARATE, "num_rollouts=4", "weight_sync_interval=2", "parity.stop=0")
    rows = metrics_of(tmp_path)
    assert [row["sync/version"] for row in rows] == [0, 0, 4, 4]  # two updates a step


@pytest.mark.slow
def test_a_run_that_stops_between_two_publications_resumes_exactly(tmp_path) -> None:
    settings = ("weight_sync_interval=2", "save_interval=1", "parity.stop=0", "evaluation.eval_steps=1")
    run(tmp_path / "unbroken", SEPARATE, "num_rollouts=4", *settings)
    run(tmp_path / "broken", SEPARATE, "num_rollouts=3", *settings)
    run(tmp_path / "broken", SEPARATE, "num_rollouts=4", *settings)
    whole, resumed = metrics_of(tmp_path / "unbroken"), metrics_of(tmp_path / "broken")
    assert resumed == whole
    final = "checkpoints/checkpoint-000004/policy/weights.safetensors"
    assert (tmp_path / "broken" / final).read_bytes() == (tmp_path / "unbroken" / final).read_bytes()


def test_an_engine_in_another_precision_stops_before_the_first_update(tmp_path) -> None:
    with pytest.raises(DivergenceError, match=r"in another dtype \(rollout.dtype") as error:
        run(tmp_path, SEPARATE, "num_rollouts=1", "rollout.dtype=bf16", "parity.stop=1")
    assert error.value.code == 9002
    assert not (tmp_path / "metrics.jsonl").exists() or metrics_of(tmp_path) == []


def test_it_may_train_nevertheless(tmp_path, capsys) -> None:
    trainer = run(tmp_path, SEPARATE, "num_rollouts=2", "rollout.dtype=bf16", "parity.stop=0")
    assert trainer.policy.version == 4
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any("clip ranges" in event.get("text", "") for event in events)
    assert any(event["ev"] == "alarm.raise" and event["alarm"] == "parity" for event in events)
