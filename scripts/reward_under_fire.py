"""Stress test: many clients of a reward service use a proxy with faults, while the service is killed and restarted.

    python scripts/reward_under_fire.py --out benchmarks/reward_under_fire.json      64 clients x 2,000 items, minutes

Each client scores its own images by their brightness, which is also computed locally. An item without a score is lost,
and an item with another score is wrong. The exit status is 1 if an item was lost, wrong, or scored twice without a
restart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from reward_service.faults import FaultProxy  # noqa: E402
from reward_service.running import RunningService  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from unirl.reward.local.image_statistics import BrightnessRewardScorer  # noqa: E402
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec  # noqa: E402
from unirl.types.reward import RewardRequest  # noqa: E402

SIDE = 8
PROCESSES = 2
"""Number of processes whose threads are the clients."""
TIMEOUT_S, DELAY_S = 5.0, 6.0
"""Timeout of a client, and the delay of a late response."""
SERVICE = {
    "rewards": [
        {
            "name": "brightness",
            "scorer": "brightness",
            "num_threads": 1,
            "batch_size": 256,
            "max_queue": 8192,
            "device": "cpu",
        }
    ],
    "server": {"limits": {"remembered": 300_000}},
}


@dataclass
class FireResult:
    """The outcome of one run."""

    clients: int
    items_per_client: int
    fault_rate: float
    kills: int = 0
    """Number of times that the service was killed (SIGKILL) and restarted."""
    seconds: float = 0.0
    items_per_s: float = 0.0
    lost: int = 0
    wrong: int = 0
    repeated: int | None = None
    """Items that were scored more than once. Unknown after a restart, which resets the counter of the service."""
    requests: dict[str, int] = field(default_factory=dict)
    """Number of requests by the fault of the proxy."""

    @property
    def holds(self) -> bool:
        return not (self.lost or self.wrong or self.repeated)


def images_of(client: int, count: int) -> Tensor:
    """Returns random images [count, 3, SIDE, SIDE] of a client."""
    generator = torch.Generator().manual_seed(client)
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=generator).float() / 255


def one_client(url: str, client: int, count: int) -> dict[str, int]:
    """Scores the client's images, compares the scores, and returns the numbers of lost and wrong items."""
    images = images_of(client, count)
    request = RewardRequest(
        sample_ids=[f"{client}:{row}" for row in range(count)],
        prompts=[""] * count,
        images=images,
        metadata=[{}] * count,
    )
    spec = RemoteRewardSpec(
        base_url=url,
        required_rewards=("brightness",),
        batch_size=20,
        concurrency=2,
        timeout=TIMEOUT_S,
        retry_delay=0.05,
        max_retries=100,
        startup_s=120.0,
    )
    response = RemoteRewardBackend(config=spec).score(request)
    expected = BrightnessRewardScorer().score(request).total
    lost = len(response.failed_rows())
    return {"lost": lost, "wrong": int((response.total != expected).sum()) - lost}


def clients(url: str, first: int, last: int, count: int) -> None:
    """Runs the clients of one process and prints their counts, start and end as a line of JSON."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    with ThreadPoolExecutor(last - first) as pool:
        results = list(pool.map(lambda client: one_client(url, client, count), range(first, last)))
    counts = {key: sum(result[key] for result in results) for key in ("lost", "wrong")}
    print(json.dumps(counts | {"begun": begun, "ended": time.monotonic()}), flush=True)


def run(num_clients: int, count: int, rate: float, kills: int, pause_s: float) -> FireResult:
    """Runs all clients once."""
    outcome = FireResult(num_clients, count, rate)
    with ExitStack() as stack:
        service = stack.enter_context(RunningService(SERVICE))
        proxy = stack.enter_context(FaultProxy(service.url, rate=rate, seed=7, delay_s=DELAY_S))
        over = threading.Event()
        killer = threading.Thread(target=kill_and_restart, args=(service, kills, pause_s, over, outcome))
        killer.start()
        shares = [num_clients * i // PROCESSES for i in range(PROCESSES + 1)]
        words = [sys.executable, __file__, "--url", proxy.url, "--items", str(count), "--share"]
        processes = [subprocess.Popen([*words, f"{a}:{b}"], stdout=subprocess.PIPE) for a, b in pairwise(shares)]
        texts = [process.communicate()[0] for process in processes]
        over.set()
        killer.join()
        assert all(process.returncode == 0 for process in processes), "a client failed; its error is above"
        results = [json.loads(text) for text in texts]
        outcome.lost, outcome.wrong = (sum(result[key] for result in results) for key in ("lost", "wrong"))
        outcome.seconds = round(max(r["ended"] for r in results) - min(r["begun"] for r in results), 1)
        outcome.requests = dict(sorted(proxy.counts.items()))
        outcome.items_per_s = round(num_clients * count / outcome.seconds, 1)
        if not outcome.kills:
            outcome.repeated = scored(service.url) - num_clients * count
    return outcome


def kill_and_restart(
    service: RunningService, kills: int, pause_s: float, over: threading.Event, outcome: FireResult
) -> None:
    """Kills and restarts the service repeatedly while the clients run."""
    while outcome.kills < kills and not over.wait(pause_s):
        service.kill()
        outcome.kills += 1
        service.start()


def scored(url: str) -> int:
    """Returns the number of items that the service has scored since its start."""
    with urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read(2**22).decode().splitlines()
    name = 'unirl_reward_items_total{outcome="scored",reward="brightness"}'
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--items", type=int, default=2000, help="items per client")
    parser.add_argument("--kills", type=int, default=4, help="restarts of the service in the runs that have restarts")
    parser.add_argument("--pause-s", type=float, default=10.0, help="seconds between restarts")
    parser.add_argument("--out", help="the JSON file for the outcome")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.share:
        first, last = map(int, options.share.split(":"))
        clients(options.url, first, last, options.items)
        return 0
    outcomes = []
    for rate, kills in ((0.0, 0), (0.2, 0), (0.2, options.kills), (0.4, 0), (0.4, options.kills)):
        outcomes.append(run(options.clients, options.items, rate, kills, options.pause_s))
        print(outcomes[-1], flush=True)
    if options.out:
        content = {"machine": machine(), "runs": [asdict(outcome) for outcome in outcomes]}
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(outcome.holds for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
