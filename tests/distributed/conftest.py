"""Pools of both runtimes, for tests of the one contract that they keep."""

from collections.abc import Iterator

import pytest

from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.base import Pool
from unirl.distributed.group.pool import open_pool


@pytest.fixture
def local_pool() -> Iterator[Pool]:
    pool = open_pool("local", 4, deadline_s=600.0)
    yield pool
    pool.close()


@pytest.fixture(params=["local", "ray"])
def pool(request) -> Pool:
    """An empty pool of four devices, of either runtime."""
    return request.getfixturevalue(f"{request.param}_pool")


@pytest.fixture
def device_set(pool) -> DeviceSet:
    """The largest device_set that tests place one group on: two ranks where the runtime has them."""
    return DeviceSet("device", (0,) if type(pool).__name__ == "LocalPool" else (0, 1))
