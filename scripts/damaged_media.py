"""Sends damaged pictures and videos to a reward service, and shows that none ends a process, hangs it, or fills memory.

    python scripts/damaged_media.py --count 10000 --out benchmarks/damaged_media.json          about 3 minutes

Every file is a good one with up to a dozen changes. Exit status 1: an answer of 500 or above, a process lost, an answer
later than 2 s, or a decoder above 300 MB.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402
from reward_service.faults import damaged, media  # noqa: E402
from reward_service.running import RunningService  # noqa: E402

from benchmarks.harness import machine  # noqa: E402

MAX_S, MAX_MB = 2.0, 300.0
SERVICE = {"rewards": [{"name": "brightness", "scorer": "brightness", "num_threads": 1}]}


@dataclass
class Found:
    """What came of the files."""

    statuses: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    """The first words of the refusals."""
    slowest_s: float = 0.0
    peak_mb: dict[str, float] = field(default_factory=dict)
    """Of each process of the service."""
    lost_processes: int = 0

    @property
    def holds(self) -> bool:
        worst = max((mb for name, mb in self.peak_mb.items() if "decoder" in name), default=0.0)
        return (
            not any(status >= "500" for status in self.statuses)
            and not self.lost_processes
            and self.slowest_s <= MAX_S
            and worst <= MAX_MB
        )


def body_of(modality: str, data: bytes) -> bytes:
    turn = {"text": "a", f"{modality}_b64": base64.b64encode(data).decode()}
    return json.dumps({"requests": [{"history": [turn], "required_rewards": ["brightness"]}]}).encode()


def send(http: httpx2.Client, body: bytes, found: Found) -> None:
    begun = time.monotonic()
    answer = http.post("/score", content=body, headers={"content-type": "application/json"})
    found.slowest_s = max(found.slowest_s, time.monotonic() - begun)
    found.statuses[str(answer.status_code)] += 1
    if answer.status_code != 200:
        found.problems[answer.json()["detail"].partition(": ")[2][:40]] += 1


def processes(parent: int) -> dict[str, int]:
    """Module and number of the service's child processes -> pid."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(entry) == parent:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            found[f"{words[2].rpartition('.')[2]} {len(found)}"] = int(entry.name)
    return found


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it ended meanwhile
        return 0


def peak_mb(pid: int) -> float:
    """The largest resident memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)


def run(count: int, seed: int) -> Found:
    rng, found, files = random.Random(seed), Found(), media()
    bodies = [body_of(modality, damaged(data, rng)) for modality, data in rng.choices(files, k=count)]
    with RunningService(SERVICE) as service, httpx2.Client(base_url=service.url, timeout=60, trust_env=False) as http:
        before = processes(service.pid)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda body: send(http, body, found), bodies))
        for modality, data in files:
            assert http.post(
                "/score", content=body_of(modality, data), headers={"content-type": "application/json"}
            ).is_success
        found.lost_processes = len(before.items() - processes(service.pid).items())
        found.peak_mb = {name: peak_mb(pid) for name, pid in {"service": service.pid, **processes(service.pid)}.items()}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where to write what was found as JSON")
    options = parser.parse_args(arguments)
    found = run(options.count, options.seed)
    content = {
        "machine": machine(),
        "files": options.count,
        "statuses": dict(sorted(found.statuses.items())),
        "refusals": dict(found.problems.most_common(12)),
        "slowest_s": round(found.slowest_s, 3),
        "lost_processes": found.lost_processes,
        "peak_mb": found.peak_mb,
    }
    print(json.dumps(content, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
