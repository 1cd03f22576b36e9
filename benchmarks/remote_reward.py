"""Measures what scoring by the reward service costs: encoding and decoding, throughput and latency.

    python benchmarks/remote_reward.py --out benchmarks/remote_reward.json         about 3 minutes on a quiet machine

Clients are threads of one process. Each sends one request with 8 raw images after another. `direct` calls the same
scorer with the same images in this process.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import torch  # noqa: E402
from reward_service.config import LimitsConfig  # noqa: E402
from reward_service.decoder import DecodeLimits, decode  # noqa: E402
from reward_service.frames import DecodeMedia  # noqa: E402
from reward_service.media import decode_limits  # noqa: E402
from reward_service.running import RunningService  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from unirl.reward.client import wire  # noqa: E402
from unirl.reward.client.encoding import encode_image  # noqa: E402
from unirl.reward.registry import make_scorer  # noqa: E402
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec  # noqa: E402
from unirl.types.reward import RewardRequest  # noqa: E402

PER_REQUEST = 8
CLIENTS = (1, 16, 64)
REWARDS = ("brightness", "pickscore")
SERVICE = {
    "toy": True,
    "rewards": [{"name": name, "scorer": name, "device": "cpu", "num_threads": 1} for name in REWARDS],
}


@dataclass
class WireCost:
    """Size and time of one image in one format and encoding. Times are those of one core."""

    format: str
    encoding: str
    side: int
    kilobytes: float
    encode_ms: float
    """Time of the client to encode pixels as bytes of a request."""
    decode_ms: float
    """Time of the service to decode bytes of a request to raw pixels."""


@dataclass
class Load:
    """Throughput and latency of the service, or of the scorer in this process."""

    reward: str
    side: int
    clients: int
    """Number of clients. 0 = the scorer in this process."""
    images_per_s: float
    p50_ms: float
    """Median latency of a request with 8 images."""
    p99_ms: float
    overhead_ms: float | None = None
    """Additional time per image in comparison with the direct call."""


def scene(side: int, seed: int = 0) -> Tensor:
    """Returns an image [3, side, side] of soft shapes with a little grain, which compresses like a photograph."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 12, 12, generator=generator)
    soft = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)[0]
    grain = torch.randn(3, side, side, generator=generator) * 0.01
    return ((soft + grain).clamp(0, 1) * 255).round() / 255


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the median CPU time of one run in milliseconds."""
    work()
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        times.append((time.process_time() - begun) * 1e3)
    return round(statistics.median(times), 3)


def wire_costs(side: int) -> list[WireCost]:
    """Measures every format in both encodings."""
    picture = scene(side)
    limits = msgspec.json.decode(decode_limits(LimitsConfig()), type=DecodeLimits)
    return [
        wire_cost(picture, format, content_type, limits)
        for content_type in (wire.MSGPACK, wire.JSON)
        for format in wire.IMAGE_FORMATS
    ]


def wire_cost(picture: Tensor, format: wire.ImageFormat, content_type: str, limits: DecodeLimits) -> WireCost:
    def request() -> bytes:
        medium = encode_image(picture, format, 95)
        if content_type == wire.JSON and format != "raw":
            turn = wire.Turn(text="a", image_b64=base64.b64encode(medium.data).decode())
        else:
            turn = wire.Turn(text="a", image=medium)
        return wire.encode(
            wire.ScoreRequest(requests=[wire.ScoreItem(history=[turn], required_rewards=["a"])]), content_type
        )

    def pixels() -> wire.MediaPayload | None:
        turn = wire.decode(wire.ScoreRequest, body, content_type).requests[0].answer
        if format == "raw":
            return turn.image
        return decode(DecodeMedia("image", turn.image, turn.image_b64), limits)

    body = request()
    return WireCost(
        format=format,
        encoding=content_type.rpartition("/")[2],
        side=picture.shape[-1],
        kilobytes=round(len(body) / 1000, 1),
        encode_ms=milliseconds(request, 9),
        decode_ms=milliseconds(pixels, 9),
    )


def rows(side: int) -> RewardRequest:
    return RewardRequest(
        sample_ids=[str(i) for i in range(PER_REQUEST)],
        prompts=["a picture of soft shapes"] * PER_REQUEST,
        images=torch.stack([scene(side, seed) for seed in range(PER_REQUEST)]),
        metadata=[{}] * PER_REQUEST,
    )


def direct(reward: str, side: int, requests: int) -> Load:
    """Measures the scorer in this process."""
    scorer, request = make_scorer(reward, {}, toy=True), rows(side)
    scorer.score(request)
    return load(reward, side, 0, lambda _: scorer.score(request), requests)


def load(reward: str, side: int, clients: int, score: Callable[[int], object], requests: int) -> Load:
    """Measures `requests` calls by `clients` clients."""

    def one(number: int) -> float:
        begun = time.perf_counter()
        score(number)
        return time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(max(clients, 1)) as pool:
        times = sorted(pool.map(one, range(requests)))
    seconds = time.perf_counter() - begun
    p50, p99 = (times[min(int(len(times) * share), len(times) - 1)] * 1e3 for share in (0.5, 0.99))
    return Load(reward, side, clients, round(requests * PER_REQUEST / seconds, 1), round(p50, 2), round(p99, 2))


def through_service(url: str, reward: str, side: int, clients: int, requests: int) -> Load:
    """Measures one backend with one thread per client."""
    spec = RemoteRewardSpec(base_url=url, required_rewards=(reward,), batch_size=PER_REQUEST, concurrency=clients)
    backend, request = RemoteRewardBackend(config=spec), rows(side)
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda _: backend.score(request), range(clients)))
    return load(reward, side, clients, lambda _: backend.score(request), requests)


def all_loads(requests: int) -> list[Load]:
    loads = []
    with RunningService(SERVICE) as service:
        for reward in REWARDS:
            for side in (64, 512):
                loads.append(alone := direct(reward, side, requests))
                for clients in CLIENTS:
                    words = [service.url, reward, str(side), str(clients), str(requests)]
                    done = subprocess.run([sys.executable, __file__, "--load", *words], capture_output=True, check=True)
                    each = Load(**json.loads(done.stdout))
                    each.overhead_ms = round(1e3 / each.images_per_s - 1e3 / alone.images_per_s, 3)
                    loads.append(each)
                    print(each, flush=True)
    return loads


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--out", help="the JSON file for the results")
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.load:
        url, reward, *numbers = options.load
        print(json.dumps(asdict(through_service(url, reward, *map(int, numbers)))))
        return 0
    costs = wire_costs(512)
    for cost in costs:
        print(cost, flush=True)
    loads = all_loads(options.requests)
    if options.out:
        content = {
            "machine": machine(),
            "wire": [asdict(c) for c in costs],
            "service": [asdict(each) for each in loads],
        }
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
