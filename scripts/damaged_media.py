"""Gives damaged files to all that reads them, and checks that none ends a process, blocks it or fills memory.

    python scripts/damaged_media.py --count 10000 --out benchmarks/damaged_media.json          about 5 minutes

Every file is a valid one with up to twelve changes. Images and videos are sent to a reward service; images and prompt
files are read as a run reads them. The exit status is 1 after a status of 500 or above, the death of a process, a
response that took more than 2 s, a decoder with more than 300 MB, or an error of a run that is not one for the user.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
from reward_service.faults import damaged, media  # noqa: E402
from reward_service.running import RunningService  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from unirl.config.errors import DataError  # noqa: E402
from unirl.data.datasets import read_entries  # noqa: E402
from unirl.models.images import read_image  # noqa: E402

MAX_S, MAX_MB = 2.0, 300.0
SERVICE = {"rewards": [{"name": "brightness", "scorer": "brightness", "num_threads": 1}]}


@dataclass
class Report:
    """The responses to all files, and the state of the service afterwards."""

    statuses: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Number of refusals by their first words."""
    slowest_s: float = 0.0
    peak_mb: dict[str, float] = field(default_factory=dict)
    """Largest resident memory of each process of the service."""
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


def send(http: httpx2.Client, body: bytes, report: Report) -> None:
    start = time.monotonic()
    response = http.post("/score", content=body, headers={"content-type": "application/json"})
    report.slowest_s = max(report.slowest_s, time.monotonic() - start)
    report.statuses[str(response.status_code)] += 1
    if response.status_code != 200:
        report.refusals[response.json()["detail"].partition(": ")[2][:40]] += 1
    elif error := response.json()["errors"][0].get("brightness"):
        report.refusals[error.rpartition("]: ")[2][:40]] += 1  # a valid video is refused without a place


def processes(parent: int) -> dict[str, int]:
    """Returns the pids of the service's child processes by module and number."""
    pids: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(entry) == parent:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            pids[f"{words[2].rpartition('.')[2]} {len(pids)}"] = int(entry.name)
    return pids


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # the process has ended
        return 0


def peak_mb(pid: int) -> float:
    """Returns the largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)


def run(count: int, seed: int) -> Report:
    rng, report, files = random.Random(seed), Report(), media()
    bodies = [body_of(modality, damaged(data, rng)) for modality, data in rng.choices(files, k=count)]
    with RunningService(SERVICE) as service, httpx2.Client(base_url=service.url, timeout=60, trust_env=False) as http:
        before = processes(service.pid)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda body: send(http, body, report), bodies))
        for modality, data in files:
            assert http.post(
                "/score", content=body_of(modality, data), headers={"content-type": "application/json"}
            ).is_success
        report.lost_processes = len(before.items() - processes(service.pid).items())
        pids = {"service": service.pid, **processes(service.pid)}
        report.peak_mb = {name: peak_mb(pid) for name, pid in pids.items()}
    return report


@dataclass
class RunReport:
    """The results of reading files as a run does."""

    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    """Number of errors by their class that are no `DataError`."""
    slowest_s: float = 0.0


def prompt_files() -> list[tuple[str, bytes]]:
    """Returns a prompt file of every format, each with its extension."""
    rows = [{"prompt": "a cat", "prompt_id": "p1", "metadata": {"answer": "4", "n": [1, 2]}}, {"prompt": "two dogs"}]
    with tempfile.TemporaryFile() as file:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"] * 20, "answer": ["1", "2"] * 20}), file)
        file.seek(0)
        table = file.read()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = (("jsonl", lines), ("json", json.dumps(rows)), ("txt", "a cat\ntwo dogs\n"))
    return [*((kind, text.encode()) for kind, text in texts), ("parquet", table)]


def read_as_a_run(count: int, seed: int) -> RunReport:
    """Reads damaged images and prompt files, half of each."""
    rng, report = random.Random(seed), RunReport()
    files = [("image", data) for modality, data in media() if modality == "image"], prompt_files()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            kind, data = rng.choice(files[number % 2])
            path = Path(folder) / f"a.{kind}"
            path.write_bytes(damaged(data, rng))
            start = time.monotonic()
            try:
                if kind == "image":
                    read_image(str(path))
                else:
                    list(read_entries(path))
                report.outcomes[f"{kind} read"] += 1
            except DataError:
                report.outcomes[f"{kind} refused"] += 1
            except Exception as error:  # any other class is a finding
                report.crashes[f"{kind} {type(error).__name__}"] += 1
            report.slowest_s = max(report.slowest_s, time.monotonic() - start)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="the JSON file for the report")
    options = parser.parse_args(arguments)
    read = read_as_a_run(options.count, options.seed)
    report = run(options.count, options.seed)
    content = {
        "machine": machine(),
        "files": options.count,
        "statuses": dict(sorted(report.statuses.items())),
        "refusals": dict(report.refusals.most_common(12)),
        "slowest_s": round(report.slowest_s, 3),
        "lost_processes": report.lost_processes,
        "peak_mb": report.peak_mb,
        "run": {
            "files": options.count,
            "outcomes": dict(sorted(read.outcomes.items())),
            "crashes": dict(read.crashes),
            "slowest_s": round(read.slowest_s, 3),
        },
    }
    print(json.dumps(content, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if report.holds and not read.crashes else 1


if __name__ == "__main__":
    sys.exit(main())
