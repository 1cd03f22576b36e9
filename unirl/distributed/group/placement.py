"""Which devices a set of sibling roles shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import IncompatibleError

__all__ = ["DeviceSet", "placement"]

if TYPE_CHECKING:
    from unirl.distributed.group.handle import Group
    from unirl.distributed.group.pool import Pool


@contextmanager
def placement(pool: Pool, fraction: float = 1.0, shared_workers: Group | None = None) -> Iterator[Group]:
    """Workers for sibling roles: on the next fraction of the pool's devices, or those of another placement.

    Raises:
        ConfigError: 2020 when the fraction is no whole number of devices, or more than are left.
    """
    count = pool.num_devices * fraction
    if count != round(count) or count < 1:
        raise IncompatibleError(
            f"a placement on {fraction:g} of {pool.num_devices} devices is {count:g} devices: "
            "choose a fraction that gives a whole number, at least 1"
        )
    yield shared_workers or pool.group(pool.take(round(count)))
