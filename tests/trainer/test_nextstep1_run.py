"""The recipe of NextStep-1: it continues exactly where it was stopped, and two workers do what one process does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run_files import metrics_of
from unirl.config.errors import Preempted
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.trainer.assemble import build_trainer
from unirl.trainer.export import export_checkpoint
from unirl.trainer.run_folder import saved_run

RECIPE = "unified_model/nextstep_1_grpo"
COMMON = ("scale=toy", "num_rollouts=2", "evaluation.eval_steps=0", "tracking.sample_steps=0")
WEIGHTS = "checkpoints/checkpoint-000002/policy/weights.safetensors"


def run(folder: Path, *overrides: str, stop: bool = False) -> dict[str, Any]:
    """Train, or stop after the first step; the trained weights."""
    recipe = load(RECIPE, [*COMMON, f"run.dir={folder}", *overrides])
    preflight(recipe)
    with build_trainer(recipe) as trainer:
        if stop:
            trainer.request_stop(signal.SIGTERM)
        trainer.train()
        return dict(trainer.policy.roles.backend.gather())


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_stopped_run_continues_bit_for_bit(lora: bool, tmp_path: Path) -> None:
    overrides = () if lora else ("backend.lora_cfg=null",)
    run(tmp_path / "whole", *overrides)
    with pytest.raises(Preempted):
        run(tmp_path / "stopped", *overrides, stop=True)
    run(tmp_path / "stopped", *overrides)
    rows = metrics_of(tmp_path / "whole")
    assert rows == metrics_of(tmp_path / "stopped")
    assert [row["rollout/parity_absdiff_max"] for row in rows] == [0.0, 0.0]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "stopped" / WEIGHTS).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("formats", [("peft",), ("full",)])
def test_the_exports_of_a_run_are_verified(formats: tuple[str, ...], tmp_path: Path) -> None:
    run(tmp_path)
    [file] = export_checkpoint(saved_run(tmp_path), ["a red circle", "x"], formats)
    assert file.difference is not None and file.difference < 1e-4
    card = (tmp_path / "export" / "checkpoint-000002" / formats[0] / "README.md").read_text()
    assert ("library_name: unirl" in card and "`bundle.path`" in card) == (formats == ("full",))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_workers_train_the_weights_of_one_process(lora: bool, workers: Any, tmp_path: Path) -> None:
    overrides = () if lora else ("backend.lora_cfg=null",)
    alone = run(tmp_path / "one", *overrides)
    together = run(tmp_path / "two", *overrides, "num_devices=2", "runtime=ray")
    rewards = [[row["rollout/reward_mean"] for row in metrics_of(tmp_path / name)] for name in ("one", "two")]
    assert rewards[0][0] == rewards[1][0]
    assert [row["rollout/parity_absdiff_max"] for row in metrics_of(tmp_path / "two")] == [0.0, 0.0]
    assert alone.keys() == together.keys()
    for name, weight in alone.items():
        gap = (together[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert gap <= 1e-5, f"{name}: {gap:.2g}"


@pytest.mark.slow
def test_two_workers_continue_a_stopped_run_bit_for_bit(workers: Any, tmp_path: Path) -> None:
    two = ("num_devices=2", "runtime=ray")
    whole = run(tmp_path / "whole", *two)
    with pytest.raises(Preempted):
        run(tmp_path / "stopped", *two, stop=True)
    continued = run(tmp_path / "stopped", *two)
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "stopped")
    assert all(torch.equal(continued[name], weight) for name, weight in whole.items())
