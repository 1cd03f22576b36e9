"""Processes, dispatch, and bytes on the wire."""

from unirl.distributed.group.rank import RankInfo, current

__all__ = ["RankInfo", "current"]
