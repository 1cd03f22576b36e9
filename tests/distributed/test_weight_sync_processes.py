"""Weight sync between processes: the trainer on two sharded ranks, the engine on two of its own or on the same ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.sync_ends import FaultyEngine, toy_pipeline
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import SyncError
from unirl.distributed.group.base import Pool
from unirl.distributed.group.dispatch import broadcast, collect
from unirl.distributed.group.handle import Remote
from unirl.distributed.weight_sync.buckets import Bucket
from unirl.distributed.weight_sync.endpoints import WeightSender
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.testing.toy import toy_request
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig

pytestmark = pytest.mark.slow
WIDTH = 128
TRAIN, OTHERS = DeviceSet("device", (0, 1)), DeviceSet("device", (2, 3))
BESIDE = DeviceSet("device", (0, 1), process=1)


class MovingBackend(FSDPBackend):
    """A backend that a test can move without a loss."""

    @broadcast
    def move(self) -> None:
        """Every trainable weight, by an amount that depends on its place."""
        with torch.no_grad():
            for shard in self.shards.values():
                shard.add_(0.25)
        self.updates += 1


class BreakableEngine(FaultyEngine):
    """An engine that a test can break from outside."""

    @collect
    def break_on(self, rank: int) -> None:
        from unirl.distributed import current

        if current().rank == rank:
            self.bend = flipped

    @collect
    def weights_held(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.network.named_parameters() if p.requires_grad}


def flipped(bucket: Bucket) -> Bucket:
    bucket.data[0] ^= 1
    return bucket


def make_backend(lora: LoraConfig | None, siblings: Any) -> MovingBackend:
    return MovingBackend(siblings["bundle"], 3, optimizer_cfg=OptimizerConfig(learning_rate=1e-2), lora_cfg=lora)


def make_sender(siblings: Any) -> WeightSender:
    return WeightSender(siblings["backend"], siblings["bundle"].stage(), siblings.get("rollout"))


def make_bundle(siblings: Any) -> Any:
    return toy_pipeline(width=WIDTH).bundle


def make_engine(siblings: Any) -> BreakableEngine:
    return BreakableEngine(toy_pipeline(width=WIDTH))


def joined(pool: Pool, rollout: DeviceSet, lora: LoraConfig | None, **keys: Any) -> dict[str, Any]:
    """Handles of all roles, and the sync between them in buckets of one tensor or two."""
    train_group, rollout_group = pool.group(TRAIN), pool.group(rollout)
    engine = rollout_group.place(Remote("rollout", make_engine))
    train_group.place(Remote("bundle", make_bundle))
    backend = train_group.place(Remote("backend", partial(make_backend, lora)))
    sender = train_group.place(Remote("sender", make_sender))
    sync = EngineSync(sender, engine, **keys)
    sync.bucket_bytes = 1024
    return {"engine": engine, "backend": backend, "sync": sync}


WAYS = {
    "colocate": (TRAIN, {}),
    "broadcast": (OTHERS, {}),
    "ray": (OTHERS, {"transport": "ray"}),
    "shared_buffer": (BESIDE, {"transport": "cuda_ipc"}),
}


@pytest.mark.parametrize("lora", [LoraConfig(rank=2, alpha=4.0), None], ids=["lora", "full"])
@pytest.mark.parametrize("way", WAYS)
def test_sharded_weights_reach_every_engine_rank_bit_for_bit(ray_pool: Pool, way: str, lora: LoraConfig | None) -> None:
    device_set, keys = WAYS[way]
    parts = joined(ray_pool, device_set, lora, **keys)
    for version in (1, 2):
        parts["backend"].move()
        before = ray_pool.traffic
        report = parts["sync"].push(version)
        assert report.canary_absdiff == 0.0
    passed = ray_pool.traffic - before
    assert passed < 8000, f"{passed} bytes through the driver"
    assert report.num_bytes > (100_000 if lora is None else 2000)
    expected = parts["backend"].gather()
    for held in parts["engine"].weights_held():
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], expected[name]) for name in expected)
    resp = parts["engine"].generate(toy_request(1).from_weights("live", 2))
    assert resp.tracks["image"].weight_version.unique().tolist() == [2]


@pytest.mark.parametrize("way", WAYS)
def test_a_bit_that_flips_at_one_rank_is_named_with_that_rank(ray_pool: Pool, way: str) -> None:
    device_set, keys = WAYS[way]
    parts = joined(ray_pool, device_set, LoraConfig(rank=2, alpha=4.0), **keys)
    parts["sync"].push(0)
    parts["engine"].break_on(1)
    parts["backend"].move()
    with pytest.raises(SyncError, match=r"lora_A.default.weight' did not arrive as it was sent at engine rank 1"):
        parts["sync"].push(1)
    with pytest.raises(SyncError, match="has no verified weights"):
        parts["engine"].generate(toy_request(1).from_weights("live", 0))
