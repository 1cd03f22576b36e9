"""Who runs where: pools of devices, groups of workers, and the handles that the driver calls."""

from unirl.distributed.group.handle import Handle, Remote, submit
from unirl.distributed.group.pool import open_pool
from unirl.distributed.group.rank import RankInfo, current

__all__ = ["Handle", "RankInfo", "Remote", "current", "open_pool", "submit"]
