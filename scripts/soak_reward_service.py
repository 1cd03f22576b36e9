"""Sends many requests of several kinds to one reward service, and samples the memory of its processes.

    python scripts/soak_reward_service.py --requests 100000 --out benchmarks/soak_reward_service.json      5 minutes

A fifth of the requests are images in files, two tenths are refused or fail, and a tenth open a new connection. Every
item has an id of its own, so the cache of scores fills up to its limit. The exit status is 1 if an answer is
wrong, or the service's process ends with 10 % more memory than it had after a third of the requests.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from reward_service.faults import image_file  # noqa: E402
from reward_service.running import RunningService  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from benchmarks.reward_throughput import SERVICE, Caller  # noqa: E402

CLIENTS = 8
REMEMBERED = 5000
"""Number of scores that the service keeps. It is small, so that the cache is full early."""
SAMPLES = 60
GROWTH = 0.10
MSGPACK = "application/msgpack"


def kinds() -> dict[str, tuple[dict[str, object], int]]:
    """Returns the kinds of items, and the status of each: one cycle of ten requests."""
    text = {
        "history": [{"text": "1 + 1?"}, {"text": "#### 2"}],
        "required_rewards": ["sums"],
        "metadata": {"answer": "2"},
    }
    png = base64.b64encode(image_file(np.full((32, 32, 3), 51, np.uint8), "png")).decode()
    image = {"history": [{"text": "", "image_b64": png}], "required_rewards": ["brightness"]}
    bad_image = {"history": [{"text": "", "image_b64": png[:60]}], "required_rewards": ["brightness"]}
    unknown = {"history": [{"text": ""}], "required_rewards": ["none"]}
    return {
        "text 0": (text, 200),
        "text 1": (text, 200),
        "image 0": (image, 200),
        "text 2": (text, 200),
        "text 3": (text, 200),
        "bad image": (bad_image, 200),
        "text 4": (text, 200),
        "image 1": (image, 200),
        "unknown": (unknown, 400),
        "new connection": (text, 200),
    }


class Soak:
    """Clients that send requests until their number is reached."""

    def __init__(self, service: RunningService, requests: int) -> None:
        self._service, self._requests = service, requests
        self._number, self._lock = 0, threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[tuple[int, float]] = []
        """Number of requests sent, and memory of the service's process in MB."""

    def run(self) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda _: self._client(), range(CLIENTS)))

    def _client(self) -> None:
        caller, cycle = Caller(self._service.url), kinds()
        while (number := self._next()) is not None:
            name = list(cycle)[number % len(cycle)]
            item, expected = cycle[name]
            if name == "new connection":
                caller.close()
            body = msgspec.msgpack.encode({"requests": [item | {"request_id": f"r{number}"}]})
            status, answer = caller.call(caller.request(body, MSGPACK))
            self._check(name, status, expected, answer)

    def _next(self) -> int | None:
        with self._lock:
            if self._number % max(1, self._requests // SAMPLES) == 0:
                self.memory.append((self._number, resident_mb(self._service.pid)))
            if self._number >= self._requests:
                return None
            self._number += 1
            return self._number - 1

    def _check(self, name: str, status: int, expected: int, answer: bytes) -> None:
        self.counts[f"{name.partition(' ')[0]}: {status}"] += 1
        right = status == expected
        if right and status == 200:
            content = msgspec.msgpack.decode(answer)
            totals = [parts["total"] for parts in content["results"][0].values()]
            wanted = {"image": [np.float32(51 / 255)], "bad": []}.get(name.split()[0], [1.0])
            right = np.allclose(totals, wanted) if wanted else not totals
        if not right:
            self.wrong.append(f"{name}: {status} {answer[:200]!r}")


def resident_mb(pid: int) -> float:
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", help="the JSON file for the figures")
    options = parser.parse_args(arguments)
    settings = SERVICE | {"server": {"limits": {"remembered": REMEMBERED, "client_share": 1.0}}}
    with RunningService(settings) as service:
        soak = Soak(service, options.requests)
        begun = time.monotonic()
        soak.run()
        seconds = time.monotonic() - begun
        memory = [mb for _, mb in soak.memory]
        third, last = (statistics.median(memory[i : i + 5]) for i in (len(memory) // 3, len(memory) - 5))
    figures = {
        "requests": options.requests,
        "seconds": round(seconds, 1),
        "wrong": len(soak.wrong),
        "answers": dict(sorted(soak.counts.items())),
        "mb_first": memory[0],
        "mb_after_a_third": third,
        "mb_last": last,
        "mb_highest": max(memory),
        "memory": soak.memory,
    }
    print({name: value for name, value in figures.items() if name != "memory"}, *soak.wrong[:3], flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps({"machine": machine()} | figures) + "\n")
    return 1 if soak.wrong or last > (1 + GROWTH) * third else 0


if __name__ == "__main__":
    sys.exit(main())
