"""Rows that travel through TransferQueue or Mooncake arrive as they were, and a service that is gone is named."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.distributed.roles import Camera, Shots
from tests.trainer.test_runtimes import assert_same, run
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import (
    AddressError,
    IncompatibleError,
    InvalidValueError,
    LostWorkerError,
    ResourceError,
    StallError,
    UnsupportedEnvironmentError,
)
from unirl.distributed.group.handle import Remote
from unirl.distributed.group.ray_pool import RayPool
from unirl.distributed.tensor.backend.transfer_queue import mooncake
from unirl.distributed.tensor.backend.transfer_queue.mooncake import MooncakeBackend, ZeroCopy
from unirl.distributed.tensor.backend.transfer_queue.runtime import ServiceProcess, endpoint, guarded
from unirl.distributed.tensor.backend.transfer_queue.simple import SimpleBackend
from unirl.distributed.tensor.backend.transfer_queue.transport import BlockCarrier
from unirl.distributed.tensor.row_store import RowPayload
from unirl.trainer import assemble

MASTER = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
needs_mooncake = pytest.mark.skipif(MASTER is None, reason="needs the extra transfer-queue")
PICTURES = 16


class Blocks:
    """A service in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.processes = ()

    def put(self, key, block) -> None:
        self.kept[key] = block.clone()

    def take(self, key, size):
        block = self.kept.pop(key)
        assert block.numel() == size
        return block


def test_a_parcel_carries_every_kind_of_value_to_the_bit() -> None:
    service = Blocks()
    sender, reader = (BlockCarrier(name, lambda: service, 5.0) for name in ("a", "b"))
    values = [
        torch.arange(12, dtype=torch.int64).view(3, 4).t(),
        {"odd": torch.tensor([True, False, True]), "half": torch.randn(2, 3).to(torch.bfloat16)},
        ["a row", "another"],
        torch.empty(0, 5),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    message = sender.send([RowPayload(value, False) for value in values])
    tensors, mapping, names, empty, scalar = (payload.value for payload in reader.receive(message))
    assert torch.equal(tensors, values[0]) and torch.equal(scalar, values[4]) and names == values[2]
    assert all(
        torch.equal(mapping[key], values[1][key]) and mapping[key].dtype == values[1][key].dtype for key in mapping
    )
    assert empty.shape == (0, 5)
    assert not service.kept, "a message that was read stays in the service"


def test_rows_without_tensors_need_no_service() -> None:
    def connect():
        raise AssertionError("connected")

    carrier = BlockCarrier("a", connect, 5.0)
    (payload,) = carrier.receive(carrier.send([RowPayload(["x"], False)]))
    assert payload.value == ["x"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_service_that_is_gone_is_the_cause_and_one_that_is_there_is_not() -> None:
    gone = ServiceProcess("storage", "127.0.0.1", free_port())

    def fail() -> None:
        raise RuntimeError("code -900")

    with pytest.raises(LostWorkerError, match=r"the storage at .* is gone \(.*refused.*while w0 sent") as e:
        guarded("w0 sent rows", fail, [gone], 5.0)
    assert "code -900" in str(e.value.__cause__)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = ServiceProcess("storage", *listener.getsockname()[:2])
        with pytest.raises(RuntimeError, match="code -900"):
            guarded("w0 sent rows", fail, [there], 5.0)
        with pytest.raises(StallError, match=r"w0 sent rows took more than 0.1 s, .* storage at"):
            guarded("w0 sent rows", lambda: time.sleep(3), [there], 0.1)


@pytest.mark.parametrize("address", ["head", "http://head/metadata", "head:x", "head:70000", ":50051"])
def test_an_address_without_host_and_port_is_refused(address) -> None:
    with pytest.raises(InvalidValueError, match=r"transfer_queue.x=.* is not HOST:PORT"):
        endpoint("m", "transfer_queue.x", address)


def test_addresses_of_the_published_page_are_read() -> None:
    assert endpoint("m", "k", "http://10.0.0.1:8080/metadata") == ServiceProcess("m", "10.0.0.1", 8080)
    assert endpoint("m", "k", "[::1]:50051") == ServiceProcess("m", "::1", 50051)


def test_a_node_without_infiniband_says_what_to_set(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mooncake, "INFINIBAND", tmp_path)
    backend = MooncakeBackend(metadata_server="http://h:1/metadata", master_server_address="h:2")
    with pytest.raises(UnsupportedEnvironmentError, match=r"no InfiniBand device found .* transfer_queue.protocol=tcp"):
        backend.devices()
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert backend.devices() == "mlx5_0,mlx5_1"


@needs_mooncake
def test_a_master_that_is_down_is_refused_before_workers_start() -> None:
    port = free_port()
    backend = MooncakeBackend(
        metadata_server=f"http://127.0.0.1:{port}/metadata", master_server_address=f"127.0.0.1:{port}", protocol="tcp"
    )
    with pytest.raises(AddressError, match=r"address=127.*no mooncake_master.*mooncake_master --rpc_port"):
        backend.start(2)


# In workers of Ray.


@contextmanager
def master():
    """A mooncake_master on loopback, and the backend that names it."""
    rpc, http = free_port(), free_port()
    command = [MASTER, f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", "--enable_http_metadata_server=true"]
    command += ["--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={http}", "--metrics_port=0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    backend = MooncakeBackend(
        metadata_server=f"http://127.0.0.1:{http}/metadata",
        master_server_address=f"127.0.0.1:{rpc}",
        protocol="tcp",
        global_segment_size_gb=0.25,
        local_buffer_size_gb=0.0625,
        zero_copy=ZeroCopy(tensor_buffer_size_gb=2**-12),  # 256 KiB: the pictures of the tests need several parts
    )
    try:
        deadline = time.monotonic() + 20
        while any(each.refusal() for each in backend.processes().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield process, backend
    finally:
        process.kill()
        process.wait()


@contextmanager
def simple():
    """A backend with one storage actor, and what ends that actor."""
    import ray
    from transfer_queue import interface

    def kill() -> None:
        for units in interface._TQ_STORAGE.values():
            for unit in units.values():
                ray.kill(unit)

    yield kill, SimpleBackend(num_units=1, unit_size=64)


@contextmanager
def stored_in_mooncake():
    with master() as (process, backend):
        yield process.kill, backend


SERVICES = {
    "simple": (simple, "storage TransferQueueStorageUnit#0"),
    "mooncake": (stored_in_mooncake, "mooncake_master"),
}


@needs_mooncake
@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVICES)
def test_a_run_has_the_same_bits_and_a_killed_service_is_the_cause(kind, ray_session, tmp_path, monkeypatch) -> None:
    open_service, name = SERVICES[kind]
    expected = run(tmp_path / "local", "diffusion/sd3_trainside", "num_rollouts=2")
    with open_service() as (kill, backend):
        pool = RayPool(2, deadline_s=600.0, preload=(), row_service=backend)
        pool.connect_s = 300.0
        monkeypatch.setattr(assemble, "open_pool", lambda *args, **options: pool)
        monkeypatch.setattr(pool, "close", pool.clear)
        try:
            separate = ("num_devices=2", "runtime=ray", "placement={train: 0, rollout: in train, reward: 1}")
            pool.num_updates = 2
            found = run(tmp_path / "workers", "diffusion/sd3_trainside", "num_rollouts=2", *separate)
            assert_same(found, expected)

            camera, viewer = (
                pool.group(DeviceSet("device", (device,))).place(Remote("camera", lambda siblings: Camera(siblings)))
                for device in (0, 1)
            )
            before = pool.traffic
            shots = camera.shoot(asked(PICTURES))
            assert viewer.develop(shots.select([5, 1])).tolist() == [5.0, 1.0]
            assert pool.traffic - before < PICTURES * 256 * 256 * 4 / 50

            kill()
            with pytest.raises(LostWorkerError, match=f"the {name} at .* is gone"):
                viewer.develop(shots.select([2]))
        finally:
            monkeypatch.undo()
            pool.close()


def asked(count: int) -> Shots:
    """Ids of pictures."""
    empty = torch.zeros(count, 1)
    return Shots(ids=torch.arange(count), pixels=empty, pids=torch.zeros(count, dtype=torch.int64))


@needs_mooncake
@pytest.mark.slow
def test_a_cluster_without_room_for_the_storage_is_refused(ray_session) -> None:
    with pytest.raises(ResourceError, match=r"takes 5001 CPU slots of the Ray cluster, and \d+ are free"):
        SimpleBackend(num_units=5000).start(1)


@needs_mooncake
@pytest.mark.slow
def test_a_second_run_in_the_same_cluster_is_refused(ray_session) -> None:
    with simple() as (_, backend):
        backend.start(1)
        try:
            with pytest.raises(IncompatibleError, match="another run uses TransferQueue in this Ray cluster"):
                backend.start(1)
        finally:
            backend.stop()
