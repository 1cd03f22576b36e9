"""Which workers a set of sibling roles shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unirl.config.errors import ConfigError
from unirl.distributed.group.pool import DevicePool, LocalGroup


@contextmanager
def placement(
    pool: DevicePool, fraction: float = 1.0, shared_workers: LocalGroup | None = None
) -> Iterator[LocalGroup]:
    """Workers on a fraction of the pool's devices, or those of another placement: roles placed here are siblings.

    Raises:
        ConfigError: 2020 when the fraction does not give a whole number of devices.
    """
    devices = pool.num_devices * fraction
    if devices != round(devices) or devices < 1:
        raise ConfigError(
            f"a placement on {fraction:g} of {pool.num_devices} devices is {devices:g} devices: "
            "choose a fraction that gives a whole number, at least 1",
            code=2020,
        )
    yield shared_workers or pool.group()
