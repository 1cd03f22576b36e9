"""Compares weight synchronisation, by payload and route, with a plain copy of the same bytes.

    python benchmarks/weight_sync.py [--width 2048] [--blocks 8] [--pairs 10] [--json out.json]

A push packs, sends and loads the weights, takes fingerprints on both sides, and runs the canary. `bare` copies the
bytes once in memory. `fingerprint` compares the fingerprint of a tensor with a copy of it. Trainer and engine are two
Ray workers with one thread each.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import Ratio, paired, report

from tests.toy import ToyBundle, ToyPipeline
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.base import Pool
from unirl.distributed.group.handle import Remote
from unirl.distributed.group.pool import open_pool
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.fingerprint import fingerprint
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig

PAYLOADS: dict[str, dict[str, Any]] = {
    "adapter": {"lora": LoraConfig(rank=32, alpha=64.0), "merge_adapters": False},
    "full": {"lora": None, "merge_adapters": False},
    "merged": {"lora": LoraConfig(rank=32, alpha=64.0), "merge_adapters": True},
}
ROUTES = ("in_process", "broadcast", "ray", "cuda_ipc")
OTHER = "other"


def bundle_of(shape: dict[str, int], siblings: Any) -> Any:
    """Returns the bundle of the trained model."""
    return ToyBundle(**shape)


def backend_of(lora: LoraConfig | None, siblings: Any) -> Any:
    backend = FSDPBackend(siblings["bundle"], optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=lora)
    backend.snapshot(OTHER)
    return backend


def engine_of(shape: dict[str, int], siblings: Any) -> Any:
    return ReplicaRolloutEngine(ToyPipeline(ToyBundle(**shape)))


def sender_of(engine_in_process: str, siblings: Any) -> Any:
    return WeightSender(siblings["backend"], siblings["bundle"].stage(), siblings.get(engine_in_process))


def sync_of(pool: Pool, route: str, payload: dict[str, Any], shape: dict[str, int], mib: int) -> EngineSync:
    """Returns the weight sync between a trainer and an engine."""
    train = pool.group(DeviceSet("device", (0,)))
    rollout = train if route == "in_process" else pool.group(DeviceSet("device", (1,)))
    train.place(Remote("bundle", partial(bundle_of, shape)))
    train.place(Remote("backend", partial(backend_of, payload["lora"])))
    engine = rollout.place(Remote("rollout", partial(engine_of, shape)))
    sender = train.place(Remote("sender", partial(sender_of, "rollout")))
    keys = {"transport": route, "bucket_mb": mib, "merge_adapters": payload["merge_adapters"]}
    return EngineSync(sender, engine, **keys)


def pushes(sync: EngineSync) -> Callable[[], object]:
    """Returns a function that pushes live weights and a snapshot in turn, so that the weights always differ."""
    names = cycle(("live", OTHER))
    return lambda: sync.push(0, next(names))


def transfer(pool: Pool, route: str, payload: str, shape: dict[str, int], mib: int, pairs: int) -> Ratio:
    sync = sync_of(pool, route, PAYLOADS[payload], shape, mib)
    num_bytes = sync.push(0).num_bytes
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    shapes = {**shape, "bytes": num_bytes, "bucket_mb": mib}
    result = paired(f"{payload} {route}", shapes, pushes(sync), data.clone, pairs)
    pool.clear()
    return result


def fingerprints(pairs: int) -> Ratio:
    tensor = torch.randn(2**26)
    return paired("fingerprint", {"bytes": tensor.nbytes}, lambda: fingerprint(tensor), tensor.clone, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers
    torch.set_num_threads(1)
    shape = {"width": args.width, "blocks": args.blocks}
    results = [fingerprints(args.pairs)]
    with closing(open_pool("ray", 2, deadline_s=600.0)) as pool:
        for route in ROUTES:
            results += [transfer(pool, route, payload, shape, args.bucket_mb, args.pairs) for payload in PAYLOADS]
    report(results, args.json)


if __name__ == "__main__":
    main()
