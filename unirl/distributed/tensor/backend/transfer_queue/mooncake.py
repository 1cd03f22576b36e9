"""A Mooncake store (https://github.com/kvcache-ai/Mooncake): workers read each other's memory over RDMA or TCP."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import ResourceError, UnsupportedEnvironmentError, WorkerError
from unirl.distributed.tensor.backend.transfer_queue.runtime import ServiceProcess, check_listening, endpoint
from unirl.distributed.tensor.backend.transfer_queue.transport import BlockCarrier

SETTING = "transfer_queue=mooncake"
INFINIBAND = Path("/sys/class/infiniband")
GIB = 2**30
NO_SPACE = -200
"""Mooncake's code for an object that no segment has room for."""
START = (
    "Start it on the head node, and keep it running: mooncake_master --rpc_port=50051 "
    "--enable_http_metadata_server=true --http_metadata_server_host=0.0.0.0 --http_metadata_server_port=8080"
)

Gibibytes = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ZeroCopy:
    """Settings of the memory that Mooncake reads and writes without a copy."""

    enable: bool = True
    """Mooncake reads and writes the rows' own memory; false = it copies them through its local buffer."""
    tensor_buffer_size_gb: Gibibytes = 2.0
    """The most memory that one transfer registers, in GiB. Larger messages travel in parts of this size."""


@dataclass(frozen=True, kw_only=True)
class MooncakeBackend:
    """Rows wait in the memory of the worker that made them, where others read them through Mooncake."""

    toy: ClassVar[Mapping[str, object]] = {
        "protocol": "tcp",
        "global_segment_size_gb": 0.25,
        "local_buffer_size_gb": 0.0625,
    }

    metadata_server: str
    """`http://HOST:8080/metadata` of mooncake_master, `etcd://...`, or P2PHANDSHAKE for none."""
    master_server_address: str
    """`HOST:50051` of mooncake_master."""
    protocol: Literal["rdma", "tcp"] = "rdma"
    """The network protocol of transfers. tcp needs no InfiniBand or RoCE card."""
    global_segment_size_gb: Gibibytes = 64.0
    """Room for rows that wait, in GiB. The devices of the run share it equally."""
    local_buffer_size_gb: Gibibytes = 10.0
    """Buffer of each worker for transfers that copy, in GiB."""
    device_name: str | None = None
    """RDMA devices of a node, separated by commas; absent = all in /sys/class/infiniband."""
    zero_copy: ZeroCopy = ZeroCopy()

    @property
    def num_slots(self) -> int:
        """None: its processes are outside Ray."""
        return 0

    def start(self, num_devices: int) -> MooncakeConnection:
        """Look for the processes of Mooncake, which the user starts.

        Raises:
            DependencyError: 3001 when Mooncake is not installed, 3003 when nothing listens at an address.
            ConfigError: 2004 for an address that cannot be one.
        """
        need("mooncake", by=SETTING, extra="transfer-queue")
        processes = self.processes()
        for key, process in processes.items():
            check_listening(f"{key}={vars(self)[key.partition('.')[2]]}", process, START)
        return MooncakeConnection(self, tuple(processes.values()), int(self.global_segment_size_gb * GIB / num_devices))

    def stop(self) -> None:
        """Nothing: memory of a worker ends with the worker, and the processes of Mooncake are the user's."""

    def processes(self) -> dict[str, ServiceProcess]:
        """The processes of Mooncake by the keys that name them. Those of etcd are its own affair."""
        master = "transfer_queue.master_server_address"
        found = {master: endpoint("mooncake_master", master, self.master_server_address)}
        metadata = "transfer_queue.metadata_server"
        if self.metadata_server != "P2PHANDSHAKE" and not self.metadata_server.startswith("etcd://"):
            found[metadata] = endpoint("metadata server of Mooncake", metadata, self.metadata_server)
        return found

    def devices(self) -> str:
        """The RDMA devices of this node, separated by commas; empty for TCP.

        Raises:
            DependencyError: 3002 when the node has none.
        """
        if self.protocol == "tcp":
            return ""
        found = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
        if not found:
            raise UnsupportedEnvironmentError(
                f"transfer_queue.protocol=rdma: no InfiniBand device found under {INFINIBAND}. Set "
                "transfer_queue.protocol=tcp, or run where `ibv_devices` lists one"
            )
        return self.device_name or ",".join(found)


@dataclass(frozen=True)
class MooncakeConnection:
    """The settings and addresses with which a worker joins the store."""

    backend: MooncakeBackend
    processes: tuple[ServiceProcess, ...]
    segment_bytes: int
    """Memory that each worker gives to the store."""

    def carrier(self, worker: str, host: str, deadline_s: float) -> BlockCarrier:
        """Carries the rows of a worker. Raises DependencyError (3001, 3002) if its node cannot take part."""
        need("mooncake", by=SETTING, extra="transfer-queue")
        self.backend.devices()
        return BlockCarrier(worker, partial(MooncakeClient, self, host), deadline_s)


class MooncakeClient:
    """The client of the store in a worker."""

    def __init__(self, connection: MooncakeConnection, host: str) -> None:
        backend = connection.backend
        self.processes: Sequence[ServiceProcess] = connection.processes
        self.zero_copy = backend.zero_copy
        self.part_bytes = int(backend.zero_copy.tensor_buffer_size_gb * GIB)
        address = os.environ.get("LOCAL_IP") or host
        # Mooncake reads these when it is loaded: it listens at the address that others connect to, and takes the
        # network card that is nearest to the GPU.
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", address)
        os.environ.setdefault("MC_ENABLE_DEST_DEVICE_AFFINITY", "1")
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # type: ignore[import-not-found]

        self.store = MooncakeDistributedStore()
        local_bytes = int(backend.local_buffer_size_gb * GIB)
        code = self.store.setup(
            address,
            backend.metadata_server,
            connection.segment_bytes,
            local_bytes,
            backend.protocol,
            backend.devices(),
            backend.master_server_address,
        )
        if code != 0:
            raise WorkerError(
                f"Mooncake's setup() returned {code} at {address}: see 'Troubleshooting' in docs/transfer_queue.md"
            )
        self.placement = ReplicateConfig()
        self.placement.with_hard_pin = True  # rows that wait are never dropped to make room
        self.placement.preferred_segment = self.store.get_hostname()

    def put(self, key: str, block: Tensor) -> None:
        for part, piece in enumerate(self._pieces(block)):
            code = self._put_part(f"{key}/{part}", piece)
            if code == NO_SPACE:
                raise ResourceError(
                    f"Mooncake has no room for {piece.numel() / 2**20:,.0f} MiB of rows. Raise "
                    "transfer_queue.global_segment_size_gb, which the devices of the run share"
                )
            if code < 0:
                raise WorkerError(f"Mooncake did not take {piece.numel()} bytes: error {code}")

    def take(self, key: str, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8)
        for part, piece in enumerate(self._pieces(block)):
            got = self._get_part(f"{key}/{part}", piece)
            if got != piece.numel():
                raise WorkerError(f"Mooncake returned {got} for the {piece.numel()} bytes of {key}/{part}")
            self.store.remove(f"{key}/{part}", True)  # also while the lease of this read runs
        return block

    def _pieces(self, block: Tensor) -> Sequence[Tensor]:
        return block.split(self.part_bytes)

    def _put_part(self, key: str, piece: Tensor) -> int:
        """Mooncake's code; 0 = done."""
        if not self.zero_copy.enable:
            code: int = self.store.put(key, piece.numpy(), self.placement)
            return code
        self.store.register_buffer(piece.data_ptr(), piece.numel())
        try:
            code = self.store.put_from(key, piece.data_ptr(), piece.numel(), self.placement)
        finally:
            self.store.unregister_buffer(piece.data_ptr())
        return code

    def _get_part(self, key: str, piece: Tensor) -> int:
        """The number of bytes that were read into `piece`, or Mooncake's code, which is negative."""
        if not self.zero_copy.enable:
            buffer = self.store.get_buffer(key)
            if buffer is None:
                return -1
            piece.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
            return int(buffer.size())
        self.store.register_buffer(piece.data_ptr(), piece.numel())
        try:
            got: int = self.store.get_into(key, piece.data_ptr(), piece.numel())
        finally:
            self.store.unregister_buffer(piece.data_ptr())
        return got
