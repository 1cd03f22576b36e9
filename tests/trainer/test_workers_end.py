"""A distributed run that loses a worker, or is told to stop, says so, leaves no process, and continues exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.source_tree import ROOT
from tests.trainer.child import begin, said
from tests.warm_ray_worker import SOCKET

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(" " in sys.executable, reason="Ray starts no workers from a path with a blank"),
]


@pytest.fixture(autouse=True)
def _workers_of_ray_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to the session of the driver, and a warm worker does not."""
    monkeypatch.delenv(SOCKET, raising=False)


def test_a_worker_killed_at_random(tmp_path) -> None:
    """The evidence of 20 is benchmarks/kill_workers.json, by the same script."""
    out = tmp_path / "kills.json"
    words = ["scripts/kill_workers.py", "--trials", "1", "--seed", "7", "--relations", "separate", "--steps", "15"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (result,) = json.loads(out.read_text())["results"]
    assert result["ok"] and result["resumed_exactly"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_whole_process_group_finishes_the_step_and_saves(number, status, tmp_path) -> None:
    """As Ctrl-C in a terminal, or a scheduler, sends it: the workers get it too."""
    run = tmp_path / "run"
    overrides = ("scale=toy", "num_devices=2", "num_rollouts=500", "save_interval=0")
    driver = begin("diffusion/sd3_trainside", run, *overrides, own_session=True)
    try:
        metrics = run / "metrics.jsonl"
        begun = wait_until(lambda: not driver.is_alive() or (metrics.exists() and metrics.read_text()), 600)
        assert begun and driver.is_alive(), said(run)
        os.killpg(driver.pid, number)
        driver.join(30)
        assert driver.exitcode == status, said(run)
    finally:
        driver.kill()
    steps = len(metrics.read_text().splitlines())
    assert (run / "checkpoints" / "LATEST").read_text().strip() == f"checkpoint-{steps:06d}"
    assert f"stopped after step {steps}" in said(run)
    assert wait_until(lambda: not of_session(driver.pid), 60.0), f"processes {of_session(driver.pid)} outlived the run"


def of_session(session: int) -> list[int]:
    return [pid for pid in pids() if session_of(pid) == session]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
