"""Who runs where: pools of devices, groups of workers, and the handles that the driver calls."""

from unirl.distributed.group.dispatch import broadcast, collect, rank0, scatter
from unirl.distributed.group.handle import Group, Handle, Pending
from unirl.distributed.group.placement import DeviceSet, placement
from unirl.distributed.group.pool import DevicePool, Pool, open_pool
from unirl.distributed.group.rank import RankInfo, current
from unirl.distributed.group.remote import Remote

__all__ = [
    "DevicePool",
    "DeviceSet",
    "Group",
    "Handle",
    "Pending",
    "Pool",
    "RankInfo",
    "Remote",
    "broadcast",
    "collect",
    "current",
    "open_pool",
    "placement",
    "rank0",
    "scatter",
]
