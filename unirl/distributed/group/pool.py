"""Opens the pool of devices of a run."""

from __future__ import annotations

from typing import Literal

from unirl.distributed.group.devices import Pool
from unirl.distributed.group.local_pool import LocalPool
from unirl.distributed.group.ray_pool import RayPool
from unirl.distributed.tensor.transport import RowTransportName

__all__ = ["Pool", "Runtime", "open_pool"]

Runtime = Literal["local", "ray"]


def open_pool(
    runtime: Runtime,
    num_devices: int,
    devices_per_node: int | None = None,
    num_updates: int = 1,
    deadline_s: float = 1800.0,
    row_transport: RowTransportName = "object_store",
) -> Pool:
    """The pool of a runtime. Close it: workers of Ray outlive their roles, not their pool.

    Args:
        devices_per_node: how the devices divide over machines; all on one when absent.
        num_updates: U of the row layout.
        deadline_s: seconds that one call may take.
        row_transport: how rows travel between workers of Ray.
    """
    if runtime == "local":
        return LocalPool(num_devices, num_updates, deadline_s)
    return RayPool(num_devices, devices_per_node, num_updates, deadline_s, row_transport=row_transport)
