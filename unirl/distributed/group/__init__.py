"""Who runs where: pools of devices, groups of workers, and the handles that the driver calls."""

from unirl.distributed.group.dispatch import broadcast, rank0, scatter
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.placement import placement
from unirl.distributed.group.pool import DevicePool
from unirl.distributed.group.rank import RankInfo, current
from unirl.distributed.group.remote import Remote

__all__ = [
    "DevicePool",
    "Handle",
    "RankInfo",
    "Remote",
    "broadcast",
    "current",
    "placement",
    "rank0",
    "scatter",
]
