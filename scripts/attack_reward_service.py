"""Attacks a reward service on this machine, and measures its memory and how long another client waits meanwhile.

    python scripts/attack_reward_service.py --out benchmarks/attack_reward_service.json                 2 minutes
    python scripts/attack_reward_service.py --tree ../before         another checkout, whose service is attacked

none:     no attack for 10 s, for comparison
gzip:     30 requests at once, each of 49 KB that unpack to 48 MiB
metadata: one request of a few KB that unpacks to a key of a megabyte above 100,000 values
decoder:  decoders are killed while they are idle, before a valid image is sent
uploads:  8 connections, each of which sends one byte of its body at a time

The other client sends one text after another from the same address. Its wait includes all attempts until it has its
score. The exit status is 1 if the service held 600 MB or more, a wait took 0.5 s or more, or a valid image was refused.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from reward_service.faults import image_file  # noqa: E402
from reward_service.running import RunningService  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from benchmarks.reward_throughput import SERVICE, Caller, commit_of, environment_of, text_body  # noqa: E402

JSON, MSGPACK = "application/json", "application/msgpack"
MEMORY_MB, WAIT_S = 600.0, 0.5
"""Limits of the memory of the service's process and of the wait of another client."""
BODIES, BODY_MB = 30, 48
UPLOADS, UPLOAD_S = 8, 8.0
KILLS = 10


@dataclass
class AttackResult:
    """The figures of one attack."""

    attack: str
    seconds: float = 0.0
    peak_mb: float = 0.0
    """Largest resident memory of the service's process, without its workers and decoders."""
    others: int = 0
    """Number of texts that the other client scored meanwhile."""
    others_refused: int = 0
    """Number of its attempts that were refused."""
    longest_wait_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    """Number of the attack's requests by status, or by outcome of their item."""

    @property
    def holds(self) -> bool:
        bad = self.attack == "decoder" and set(self.statuses) != {"scored"}
        return self.peak_mb < MEMORY_MB and self.longest_wait_s < WAIT_S and not bad


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Watch:
    """Samples the memory of the service, and scores texts as another client, until it is stopped."""

    def __init__(self, service: RunningService, result: AttackResult) -> None:
        self._service, self._result = service, result
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._sample, self._score)]

    def __enter__(self) -> Watch:
        self._begun = time.monotonic()
        for thread in self._threads:
            thread.start()
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._result.seconds = round(time.monotonic() - self._begun, 1)

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self._result.peak_mb = max(self._result.peak_mb, round(resident_mb(self._service.pid), 1))

    def _score(self) -> None:
        caller, result = Caller(self._service.url), self._result
        request = caller.request(text_body(), MSGPACK)
        while not self._over.wait(0.01):
            begun = time.monotonic()
            while self._attempt(caller, request) != 200:
                result.others_refused += 1
                if self._over.wait(0.05):
                    break
            result.longest_wait_s = max(result.longest_wait_s, round(time.monotonic() - begun, 3))
            result.others += 1

    @staticmethod
    def _attempt(caller: Caller, request: bytes) -> int:
        with suppress(OSError):
            return caller.call(request)[0]
        return 0


def count(result: AttackResult, outcome: object) -> None:
    result.statuses[str(outcome)] = result.statuses.get(str(outcome), 0) + 1


def send_all(
    service: RunningService, result: AttackResult, content: bytes, number: int, headers: dict[str, str]
) -> None:
    """Sends the same JSON body on several connections at once."""

    def send(_: int) -> object:
        caller = Caller(service.url)
        try:
            return caller.call(caller.request(content, JSON, headers))[0]
        except OSError as error:
            return type(error).__name__
        finally:
            caller.close()

    with ThreadPoolExecutor(number) as pool:
        for outcome in pool.map(send, range(number)):
            count(result, outcome)


def no_attack(service: RunningService, result: AttackResult) -> None:
    time.sleep(10.0)


def attack_gzip(service: RunningService, result: AttackResult) -> None:
    turn = {"text": "", "image_b64": "A" * (BODY_MB * 2**20)}
    body = json.dumps({"requests": [{"history": [turn], "required_rewards": ["brightness"]}]}).encode()
    send_all(service, result, gzip.compress(body), BODIES, {"Content-Encoding": "gzip"})


def attack_metadata(service: RunningService, result: AttackResult) -> None:
    metadata = {"x" * 1_000_000: [0] * 100_000}
    item = {"history": [{"text": ""}], "required_rewards": ["sums"], "metadata": metadata}
    body = json.dumps({"requests": [item]}).encode()
    send_all(service, result, gzip.compress(body), 1, {"Content-Encoding": "gzip"})


def attack_decoder(service: RunningService, result: AttackResult) -> None:
    picture = base64.b64encode(image_file(np.zeros((32, 32, 3), np.uint8), "png")).decode()
    item = {"history": [{"text": "", "image_b64": picture}], "required_rewards": ["brightness"]}
    caller = Caller(service.url)
    request = caller.request(json.dumps({"requests": [item]}).encode(), JSON)
    for _ in range(KILLS):
        for pid in decoders(service.pid):
            os.kill(pid, signal.SIGKILL)
        status, body = caller.call(request)
        answer = json.loads(body)
        scored = status == 200 and answer["results"][0]
        count(result, "scored" if scored else answer.get("kind") or answer["errors"][0]["brightness"])


def decoders(parent: int) -> list[int]:
    """Returns the decoder processes of a service."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes()
            owner = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if owner == parent and b"reward_service.decoder" in command:
                pids.append(int(entry.name))
    return pids


def attack_uploads(service: RunningService, result: AttackResult) -> None:
    address = urlsplit(service.url)
    head = f"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\nTransfer-Encoding: chunked\r\n\r\n"

    def upload(_: int) -> object:
        end = time.monotonic() + UPLOAD_S
        with socket.create_connection((address.hostname, address.port), timeout=0.1) as connection:
            connection.sendall(head.encode())
            while time.monotonic() < end:
                try:
                    connection.sendall(b"1\r\n \r\n")
                    return int(connection.recv(1000)[9:12] or 0)
                except TimeoutError:
                    continue
                except OSError as error:
                    return type(error).__name__
        return "still open"

    with ThreadPoolExecutor(UPLOADS) as pool:
        for outcome in pool.map(upload, range(UPLOADS)):
            count(result, outcome)


ATTACKS: dict[str, Callable[[RunningService, AttackResult], None]] = {
    "none": no_attack,
    "gzip": attack_gzip,
    "metadata": attack_metadata,
    "decoder": attack_decoder,
    "uploads": attack_uploads,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("attacks", nargs="*", help=f"default: {' '.join(ATTACKS)}")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose service is attacked")
    parser.add_argument("--out", help="the JSON file for the figures")
    options = parser.parse_args(arguments)
    results = []
    for name in options.attacks or ATTACKS:
        result = AttackResult(name)
        with RunningService(SERVICE, environment_of(options.tree.resolve())) as service, Watch(service, result):
            ATTACKS[name](service, result)
        results.append(result)
        print(asdict(result), flush=True)
    if options.out:
        about = {"commit": commit_of(options.tree), "load": "other processes used the same cores during the run"}
        content = about | {"machine": machine(), "attacks": [asdict(result) for result in results]}
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
