"""A distributed run that loses a worker, or is told to stop, says so, leaves no process, and continues exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(" " in sys.executable, reason="Ray starts no workers from a path with a blank"),
]


def test_a_worker_killed_at_random(tmp_path) -> None:
    """The evidence of 20 is benchmarks/kill_workers.json, by the same script."""
    out = tmp_path / "kills.json"
    words = ["scripts/kill_workers.py", "--trials", "1", "--seed", "7", "--relations", "separate", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (result,) = json.loads(out.read_text())["results"]
    assert result["ok"] and result["resumed_exactly"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_whole_process_group_finishes_the_step_and_saves(number, status, tmp_path) -> None:
    """As Ctrl-C in a terminal, or a scheduler, sends it: the workers get it too."""
    overrides = ("scale=toy", "num_devices=2", "num_rollouts=500", "save_interval=0", f"run.dir={tmp_path / 'run'}")
    words = [sys.executable, "-m", "unirl.train_diffusion", "--config-name=diffusion/sd3_trainside", *overrides]
    log = tmp_path / "log"
    with open(log, "w") as file:
        driver = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text()):
            assert driver.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        os.killpg(driver.pid, number)
        assert driver.wait(30) == status, log.read_text()[-3000:]
    finally:
        driver.kill()
    steps = len(metrics.read_text().splitlines())
    latest = (tmp_path / "run" / "checkpoints" / "LATEST").read_text().strip()
    assert latest == f"checkpoint-{steps:06d}"
    assert f"stopped after step {steps}" in log.read_text()
    assert_session_ends(driver.pid)


def assert_session_ends(session: int) -> None:
    deadline = time.monotonic() + 5.0
    while left := [pid for pid in pids() if session_of(pid) == session]:
        assert time.monotonic() < deadline, f"processes {left} outlived the run"
        time.sleep(0.1)


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
