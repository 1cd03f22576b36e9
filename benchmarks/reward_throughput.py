"""Measures requests per second and latencies of the reward service of two checkouts, as interleaved bursts.

    git worktree add ../before COMMIT
    python benchmarks/reward_throughput.py --before ../before --out benchmarks/reward_throughput.json     3 minutes

Both services run at the same time, and one of them is idle while the other is measured, so that other load on the
machine hits both. Clients are threads of one process, each of which sends one prepared request after another. `ratio`
is the median over pairs of bursts; `cpu_ms` is the CPU time of the service's own process per request, which other load
hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
from reward_service.running import RunningService  # noqa: E402

from benchmarks.harness import machine  # noqa: E402

CLIENTS = (1, 8, 32)
BURST_S = 0.8
PAIRS = 12
SIDE = 128
SERVICE = {
    "rewards": [
        {"name": "brightness", "scorer": "brightness", "num_threads": 1, "device": "cpu"},
        {"name": "sums", "scorer": "gsm8k_exact_match", "num_threads": 1, "device": "cpu"},
    ]
}


class Caller:
    """One connection, on which prepared requests are sent one after another. It connects again when it was closed."""

    def __init__(self, url: str, source: str = "127.0.0.1") -> None:
        address = urlsplit(url)
        self._address, self._source = (address.hostname, address.port), source
        self._socket: socket.socket | None = None

    def request(self, content: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Returns the bytes of a request to score."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\n{more}"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def call(self, request: bytes) -> tuple[int, bytes]:
        """Returns status and body of the response. Raises OSError when the connection breaks."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 120.0, (self._source, 0))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall(request)
            return self._response(self._socket)
        except OSError:
            self.close()
            raise

    def _response(self, connection: socket.socket) -> tuple[int, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._some(connection)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._some(connection)
        if b"connection: close" in lines:
            self.close()
        return int(head[9:12]), body

    def _some(self, connection: socket.socket) -> bytes:
        piece = connection.recv(2**16)
        if not piece:
            raise ConnectionResetError("the service closed the connection")
        return piece

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def text_body() -> bytes:
    """One text with its right answer, in msgpack."""
    item = {
        "history": [{"text": "What is 1 + 1?"}, {"text": "It is 2.\n#### 2"}],
        "required_rewards": ["sums"],
        "metadata": {"answer": "2"},
    }
    return msgspec.msgpack.encode({"requests": [item]})


def image_body() -> bytes:
    """Four raw images, in msgpack."""
    image = {"format": "raw", "shape": [SIDE, SIDE, 3], "data": os.urandom(SIDE * SIDE * 3)}
    item = {"history": [{"text": "a cat", "image": image}], "required_rewards": ["brightness"]}
    return msgspec.msgpack.encode({"requests": [item] * 4})


BODIES = {"text": text_body, "images": image_body}


def environment_of(tree: Path) -> dict[str, str]:
    """Returns environment variables with which Python finds the packages of a checkout before all others."""
    return {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "unirl-reward-service")]), "PYTHONSAFEPATH": "1"}


def burst(url: str, body: bytes, clients: int, seconds: float) -> list[float]:
    """Returns the latency of every request in a burst, in seconds."""
    end = time.monotonic() + seconds

    def ask(_: int) -> list[float]:
        caller, latencies = Caller(url), []
        request = caller.request(body, "application/msgpack")
        while (begun := time.monotonic()) < end:
            status, answer = caller.call(request)
            assert status == 200, answer
            latencies.append(time.monotonic() - begun)
        caller.close()
        return latencies

    with ThreadPoolExecutor(clients) as pool:
        return [latency for latencies in pool.map(ask, range(clients)) for latency in latencies]


def quantile(latencies: Sequence[float], share: float) -> float:
    """Returns a quantile in milliseconds."""
    return round(1000 * sorted(latencies)[min(len(latencies) - 1, int(share * len(latencies)))], 2)


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process in seconds, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(before: RunningService, after: RunningService, pairs: int) -> list[dict[str, object]]:
    """Returns the figures of both services for every kind of request and number of clients."""
    rows: list[dict[str, object]] = []
    for kind, make in BODIES.items():
        body = make()
        for clients in CLIENTS:
            sides: dict[str, list[list[float]]] = {"before": [], "after": []}
            cpu = {"before": 0.0, "after": 0.0}
            for pair in range(pairs):
                order = (("before", before), ("after", after))
                for side, service in order if pair % 2 else reversed(order):
                    burst(service.url, body, clients, 0.1)
                    begun = cpu_s(service.pid)
                    sides[side].append(burst(service.url, body, clients, BURST_S))
                    cpu[side] += cpu_s(service.pid) - begun
            rates = {side: [len(each) / BURST_S for each in bursts] for side, bursts in sides.items()}
            ratios = [a / b for a, b in zip(rates["after"], rates["before"], strict=True)]
            row: dict[str, object] = {
                "requests": kind,
                "clients": clients,
                "ratio": round(statistics.median(ratios), 3),
            }
            for side, bursts in sides.items():
                every = [latency for each in bursts for latency in each]
                row |= {
                    f"{side}_per_s": round(statistics.median(rates[side]), 1),
                    f"{side}_p50_ms": quantile(every, 0.5),
                    f"{side}_p99_ms": quantile(every, 0.99),
                    f"{side}_cpu_ms": round(1000 * cpu[side] / len(every), 3),
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--before-commit", help="its commit, if it has no history")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", help="the JSON file for the figures")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        trees = (options.before.resolve(), ROOT)
        before, after = (stack.enter_context(RunningService(SERVICE, environment_of(tree))) for tree in trees)
        rows = compare(before, after, options.pairs)
    if options.out:
        commit = options.before_commit or commit_of(options.before)
        about = {
            "before": commit,
            "load": "both sides were measured in turn, so that other load on the cores hits both",
            "burst_s": BURST_S,
            "pairs": options.pairs,
        }
        Path(options.out).write_text(json.dumps(about | {"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
