"""Many clients of one reward service through a proxy that spoils requests, while the service is killed and restarted.

    python scripts/reward_under_fire.py --out benchmarks/reward_under_fire.json      64 clients x 2,000 items, minutes

Each client scores pictures of its own by their brightness, which is also computed here: an item is lost when it has no
score, wrong when it has another one. Exit status 1: an item was lost, wrong, or scored twice by a living service.
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
"""The clients are threads of so many processes."""
TIMEOUT_S, DELAY_S = 5.0, 6.0
"""How long a client waits for one answer, and how long a delayed one takes."""
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
    """What became of the items of one run."""

    clients: int
    items_per_client: int
    fault_rate: float
    kills: int = 0
    """How often the service was killed (SIGKILL) and started again."""
    seconds: float = 0.0
    items_per_s: float = 0.0
    lost: int = 0
    wrong: int = 0
    repeated: int | None = None
    """Items that the service scored more than once; unknown when it was killed, since it counts anew then."""
    requests: dict[str, int] = field(default_factory=dict)
    """What the proxy did, by fault."""

    @property
    def holds(self) -> bool:
        return not (self.lost or self.wrong or self.repeated)


def pictures(client: int, count: int) -> Tensor:
    """[count, 3, SIDE, SIDE] pictures that no other client has."""
    generator = torch.Generator().manual_seed(client)
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=generator).float() / 255


def one_client(url: str, client: int, count: int) -> dict[str, int]:
    """Score the client's pictures and compare."""
    images = pictures(client, count)
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
    answer = RemoteRewardBackend(config=spec).score(request)
    expected = BrightnessRewardScorer().score(request).total
    lost = len(answer.lost())
    return {"lost": lost, "wrong": int((answer.total != expected).sum()) - lost}


def clients(url: str, first: int, last: int, count: int) -> None:
    """The clients of one process; their counts, and when they began and ended, as a line of JSON."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    with ThreadPoolExecutor(last - first) as pool:
        found = list(pool.map(lambda client: one_client(url, client, count), range(first, last)))
    counts = {key: sum(each[key] for each in found) for key in ("lost", "wrong")}
    print(json.dumps(counts | {"begun": begun, "ended": time.monotonic()}), flush=True)


def run(num_clients: int, count: int, rate: float, kills: int, pause_s: float) -> FireResult:
    """One run."""
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
        assert all(process.returncode == 0 for process in processes), "a client ended with an error; it stands above"
        found = [json.loads(text) for text in texts]
        outcome.lost, outcome.wrong = (sum(each[key] for each in found) for key in ("lost", "wrong"))
        outcome.seconds = round(max(each["ended"] for each in found) - min(each["begun"] for each in found), 1)
        outcome.requests = dict(sorted(proxy.counts.items()))
        outcome.items_per_s = round(num_clients * count / outcome.seconds, 1)
        if not outcome.kills:
            outcome.repeated = scored(service.url) - num_clients * count
    return outcome


def kill_and_restart(
    service: RunningService, kills: int, pause_s: float, over: threading.Event, outcome: FireResult
) -> None:
    """Kill the service again and again while the clients work."""
    while outcome.kills < kills and not over.wait(pause_s):
        service.kill()
        outcome.kills += 1
        service.start()


def scored(url: str) -> int:
    """How many items the service has scored since it started."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read(2**22).decode().splitlines()
    name = 'unirl_reward_items_total{outcome="scored",reward="brightness"}'
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--items", type=int, default=2000, help="of each client")
    parser.add_argument("--kills", type=int, default=4, help="of the service, in the runs that have some")
    parser.add_argument("--pause-s", type=float, default=10.0, help="between two of them")
    parser.add_argument("--out", help="where to write the outcome as JSON")
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
