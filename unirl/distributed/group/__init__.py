"""Who runs where: pools of devices, groups of workers, and the handles that the driver calls."""

from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.dispatch import broadcast, collect, rank0, scatter
from unirl.distributed.group.handle import Group, Handle, PendingCall, submit
from unirl.distributed.group.pool import Pool, open_pool
from unirl.distributed.group.rank import RankInfo, current
from unirl.distributed.group.remote import Remote

__all__ = [
    "DeviceSet",
    "Group",
    "Handle",
    "PendingCall",
    "Pool",
    "RankInfo",
    "Remote",
    "broadcast",
    "collect",
    "current",
    "open_pool",
    "rank0",
    "scatter",
    "submit",
]
