"""The local runtime keeps the contract of handles: marked methods, columns on the driver, futures with deadlines."""

import threading

import pytest
import torch

from unirl.config.errors import ConfigError, StallError
from unirl.distributed import current
from unirl.distributed.group import DevicePool, Remote, broadcast, placement, scatter
from unirl.types.column import Column
from unirl.types.primitives import Images


class Camera:
    def __init__(self, siblings):
        self.siblings = siblings
        self.gate = threading.Event()

    @scatter(Images.concat)
    def shoot(self, count: int) -> Images:
        return Images(pixels=torch.arange(count).float().view(-1, 1, 1, 1).repeat(1, 3, 1, 1))

    @scatter(lambda results: results[0])
    def mean(self, images: Images) -> float:
        assert torch.is_tensor(images.pixels)
        return float(images.pixels.mean())

    @broadcast
    def wait(self) -> int:
        self.gate.wait()
        return current().dp_size

    @broadcast
    def open(self) -> None:
        self.gate.set()

    def private(self) -> None:
        raise AssertionError


@pytest.fixture
def pool():
    pool = DevicePool()
    yield pool
    pool.clear()


def test_heavy_results_are_columns_on_the_driver_and_tensors_at_the_callee(pool) -> None:
    with placement(pool) as group:
        camera = group.place(Remote("camera", Camera))
    images = camera.shoot(4)
    assert type(images.pixels) is Column and len(images) == 4
    assert camera.mean(images.select([3, 1])) == 2.0


def test_columns_are_freed_with_their_step(pool) -> None:
    with placement(pool) as group:
        camera = group.place(Remote("camera", Camera))
    pool.store.begin(0)
    old = camera.shoot(2)
    pool.store.begin(1)
    new = camera.shoot(2)
    pool.store.release(0)
    assert camera.mean(new) == 0.5
    with pytest.raises(LookupError, match="released with step 0"):
        camera.mean(old)


def test_only_marked_methods_can_be_called(pool) -> None:
    with placement(pool) as group:
        camera = group.place(Remote("camera", Camera))
    with pytest.raises(AttributeError, match=r"'camera' has no remote method 'private'; it has \['mean', 'open'"):
        camera.private()


def test_siblings_are_built_from_each_other(pool) -> None:
    with placement(pool) as group:
        group.place(Remote("first", Camera))
        group.place(Remote("second", lambda siblings: siblings["first"]))
    assert group.roles["second"] is group.roles["first"]


def test_a_future_past_its_deadline_says_what_it_waits_for(pool) -> None:
    with placement(pool) as group:
        camera = group.place(Remote("camera", Camera))
    pending = camera.wait.submit()
    with pytest.raises(StallError, match=r"camera.wait gave no result within 0.05 s"):
        pending.result(0.05)
    camera.open()
    assert pending.result(5.0) == 1


def test_a_role_is_placed_once(pool) -> None:
    with placement(pool) as group:
        group.place(Remote("camera", Camera))
        with pytest.raises(ConfigError, match="placed twice"):
            group.place(Remote("camera", Camera))


def test_a_fraction_must_give_whole_devices(pool) -> None:
    with pytest.raises(ConfigError, match=r"0.5 of 1 devices"), placement(pool, fraction=0.5):
        raise AssertionError
