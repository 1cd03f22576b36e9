"""Runs of text that are killed anywhere and resumed equal one that never was: policy, critic, optimizer, numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from tests.trainer.child import begin, said

RECIPE = str(ROOT / "tests/trainer/text_loop.yaml")
NUM_STEPS = 5
COMMON = (
    "plugins=[tests]",
    f"num_rollouts={NUM_STEPS}",
    "save_interval=2",
    "sampling.max_new_tokens=4",
    "evaluation.eval_steps=0",
)
PPO = (
    "algorithm={_target_: unirl.algorithms.ar_ppo.ARPPO, value_gradient: policy, whiten: true}",
    "backend.value_cfg={learning_rate: 1e-2, width: 8}",
    "stack={micro_batch_tokens: 150, num_updates_per_batch: 2}",
)
CLOCKS = ("time/", "mem/", "throughput/")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def outcome(folder: Path) -> dict[str, object]:
    """Everything that must be equal: numbers without clocks, the ledger, and all files of the final state."""
    final = folder / f"checkpoints/checkpoint-{NUM_STEPS:06d}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((final / "trainer.json").read_text())
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows],
        "ledger": (folder / "ledger.jsonl").read_text(),
        "policy": {file.name: file.read_bytes() for file in sorted((final / "policy").iterdir())},
        "trainer": {key: value for key, value in state.items() if key != "recipe"},
    }


def num_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_ppo_resumes_its_critic_with_its_policy(tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    child = begin(RECIPE, whole, *COMMON, *PPO)
    child.join(240)
    assert child.exitcode == 0, said(whole)
    for kill_after in (1, 3):
        child = begin(RECIPE, broken, *COMMON, *PPO)
        while child.is_alive() and num_lines(broken) < kill_after:
            time.sleep(0.002)
        assert child.is_alive(), said(broken)
        child.kill()
        child.join(30)
    child = begin(RECIPE, broken, *COMMON, *PPO)
    child.join(240)
    assert child.exitcode == 0, said(broken)
    have, want = outcome(broken), outcome(whole)
    assert have == want
    assert "value.safetensors" in want["policy"]
    assert all("train/explained_variance" in row and row["train/value_grad_norm"] > 0 for row in want["metrics"])
