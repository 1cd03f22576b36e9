"""TransferQueue (https://github.com/Ascend/TransferQueue) with its storage in actors of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from unirl.config.dependencies import need
from unirl.config.errors import IncompatibleError, ResourceError
from unirl.distributed.tensor.backend.transfer_queue.runtime import ServiceProcess
from unirl.distributed.tensor.backend.transfer_queue.transport import BlockCarrier

SETTING = "transfer_queue=simple"
PARTITION = "unirl"
"""The name under which TransferQueue keeps the rows of the run."""
CONTROLLER = "TransferQueueController"
"""The name of TransferQueue's own actor, of which a Ray cluster has one, and of its namespace."""
FIELD = "rows"


@dataclass(frozen=True)
class SimpleBackend:
    """Rows wait in storage actors of TransferQueue, in the memory of the nodes."""

    num_units: Annotated[int, Meta(ge=1)] = 16
    """Storage actors, spread evenly over the nodes."""
    unit_size: Annotated[int, Meta(ge=1)] = 1024
    """Messages that one storage actor has room for. A message is what one worker sends to another at once."""

    @property
    def num_slots(self) -> int:
        """One for each storage actor and one for the controller."""
        return self.num_units + 1

    def start(self, num_devices: int) -> SimpleConnection:
        """Start the actors of TransferQueue in the Ray cluster of this process.

        Raises:
            DependencyError: 3001 when TransferQueue is not installed.
            ConfigError: 2020 when another run uses TransferQueue in the same Ray cluster.
            ResourceError: 5001 when the cluster has too few CPU slots, for which TransferQueue would wait forever.
        """
        need("transfer_queue", "tensordict", by=SETTING, extra="transfer-queue")
        if _controller_exists():
            raise IncompatibleError(
                f"{SETTING}: another run uses TransferQueue in this Ray cluster, and it allows one. Wait for that run, "
                "start this one on a Ray of its own (unset RAY_ADDRESS), or use row_transport=object_store"
            )
        import ray

        free = int(ray.available_resources().get("CPU", 0))
        if free < self.num_slots:
            raise ResourceError(
                f"{SETTING} with num_units={self.num_units} takes {self.num_slots} CPU slots of the Ray cluster, and "
                f"{free} are free. Lower transfer_queue.num_units, or use row_transport=object_store"
            )
        import transfer_queue  # type: ignore[import-not-found]
        from omegaconf import OmegaConf

        storage = {"num_data_storage_units": self.num_units, "total_storage_size": self.num_units * self.unit_size}
        # With polling, TransferQueue answers a question for absent rows, where it would wait for them otherwise.
        settings = {
            "controller": {"polling_mode": True},
            "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage},
        }
        transfer_queue.init(OmegaConf.create(settings))
        config = ray.get(ray.get_actor(CONTROLLER, namespace="transfer_queue").get_config.remote())
        servers = {"controller of TransferQueue": config.controller.zmq_info}
        servers |= {f"storage {name}": info for name, info in config.backend.SimpleStorage.zmq_info.items()}
        return SimpleConnection(
            tuple(ServiceProcess(name, info.ip, int(next(iter(info.ports.values())))) for name, info in servers.items())
        )

    def stop(self) -> None:
        """End the actors of TransferQueue."""
        import transfer_queue

        transfer_queue.close()


@dataclass(frozen=True)
class SimpleConnection:
    """The addresses of the actors, for the workers."""

    processes: tuple[ServiceProcess, ...]

    def carrier(self, worker: str, host: str, deadline_s: float) -> BlockCarrier:
        """Carries the rows of a worker."""
        return BlockCarrier(worker, partial(SimpleClient, self.processes), deadline_s)


class SimpleClient:
    """The client of TransferQueue in a worker."""

    def __init__(self, processes: Sequence[ServiceProcess]) -> None:
        import transfer_queue

        transfer_queue.init()
        self.queue = transfer_queue
        self.processes = processes

    def put(self, key: str, block: Tensor) -> None:
        from tensordict import TensorDict  # type: ignore[import-not-found]

        self.queue.kv_batch_put([key], PARTITION, TensorDict({FIELD: block[None]}, batch_size=[1]))

    def take(self, key: str, size: int) -> Tensor:
        (block,) = self.queue.kv_batch_get([key], PARTITION)[FIELD].unbind()
        self.queue.kv_clear([key], PARTITION)
        if block.dtype != torch.uint8 or block.numel() != size:
            raise RuntimeError(
                f"TransferQueue returned {block.numel()} elements of {block.dtype} for the {size} bytes of {key}"
            )
        return block


def _controller_exists() -> bool:
    import ray

    try:
        ray.get_actor(CONTROLLER, namespace="transfer_queue")
    except ValueError:
        return False
    return True
