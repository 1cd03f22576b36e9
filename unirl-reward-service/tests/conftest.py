"""One service for all tests of this folder, started when the first test needs it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from reward_service.faults import noise
from reward_service.running import RunningService

from tests.processes import is_running

from .warm import warm_python

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # faulty_scorers is a package as a user's is, here and in the workers
TIMEOUT_S = 3.0


@pytest.fixture(scope="session")
def media_root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """An interpreter that starts workers at once."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_python(Path(folder)) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def service(media_root, python) -> Iterator[RunningService]:
    each = {"num_threads": 1, "python": python}
    config = {
        "server": {
            "score_timeout_s": TIMEOUT_S,
            "limits": {"items": 64, "media_roots": [str(media_root)], "header_s": 1.0},
        },
        "plugins": ["faulty_scorers"],
        "rewards": [
            {"name": "bright", "scorer": "brightness"} | each,
            {"name": "odd", "scorer": "faulty_scorers.Obedient", "max_queue": 64, "batch_size": 8} | each,
            {"name": "sums", "scorer": "gsm8k_exact_match"} | each,
        ],
    }
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with RunningService(config, {"PYTHONPATH": path}) as running:
        yield running
        pids = children(running.pid)
        assert running.stop() == 0
        assert not any(map(is_running, pids))


@pytest.fixture
def http(service) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=service.url, timeout=60.0, trust_env=False) as client:
        yield client


def a_picture(seed: int = 0, height: int = 24, width: int = 32) -> np.ndarray:
    return noise((height, width, 3), seed)


def workers(parent: int, reward: str) -> list[int]:
    """The processes that hold a reward's scorer."""
    return [pid for pid in children(parent) if f"reward_service.worker {reward} " in cmdline(pid)]


def children(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if is_running(pid) and parent_of(pid) == parent]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
