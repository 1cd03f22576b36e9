"""Both runtimes keep one contract: marks, row order, columns, futures, siblings, groups that come and go."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.distributed.roles import Camera, ids
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import ConfigError, StallError
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_worker import WorkerLocation
from unirl.types.rows import RemoteRows


@pytest.fixture
def group(pool, device_set):
    return pool.group(device_set)


@pytest.fixture
def camera(group):
    return group.place(Remote("camera", Camera))


def test_each_rank_knows_its_seat(group, camera) -> None:
    count = group.num_ranks
    assert camera.rank_facts() == [(rank, count, rank, count) for rank in range(count)]


def test_a_group_sums_over_its_ranks(group, camera) -> None:
    assert camera.total() == sum(range(1, group.num_ranks + 1))


def test_rank0_is_called_alone(camera) -> None:
    assert camera.lead() == 0


@pytest.mark.parametrize("num_rows", [1, 3, 4, 8])
def test_rows_come_back_as_they_were_sent(camera, num_rows) -> None:
    shots = camera.shoot(ids(num_rows))
    assert shots.ids.tolist() == list(range(num_rows))
    assert camera.develop(shots).tolist() == list(range(num_rows))


def test_heavy_fields_stay_on_the_workers(pool, camera) -> None:
    before = pool.traffic
    shots = camera.shoot(ids(8))
    assert type(shots.pixels) is RemoteRows and len(shots) == 8
    assert camera.develop(shots.select([5, 2, 2, 7])).tolist() == [5, 2, 2, 7]
    assert pool.traffic - before < 8 * 256 * 256 * 4 / 10


def test_workers_have_the_priority_of_the_driver(camera) -> None:
    """Ray would give them 15 less, and whatever else runs on the machine would come first."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in camera.pids()} == {own}


def test_columns_are_freed_with_their_step(pool, camera) -> None:
    pool.step = 0
    old = camera.shoot(ids(2))
    pool.step = 1
    new = camera.shoot(ids(2))
    pool.release(0)
    assert camera.develop(new).tolist() == [0, 1]
    with pytest.raises(Exception, match="released with step 0"):
        camera.develop(old)


def test_only_marked_methods_can_be_called(camera) -> None:
    with pytest.raises(AttributeError, match=r"'camera' has no remote method 'private'; it has \['crawl', "):
        camera.private()


def test_siblings_are_built_from_each_other(group, camera) -> None:
    second = group.place(Remote("second", Camera))
    assert second.sibling_names() == [["camera"]] * group.num_ranks


def test_an_equal_slab_is_the_same_group(pool, device_set, group) -> None:
    assert pool.group(DeviceSet("device", device_set.indices)) is group


def test_a_role_is_placed_once(group, camera) -> None:
    with pytest.raises(ConfigError, match="'camera' is placed twice"):
        group.place(Remote("camera", Camera))


def test_a_device_set_outside_the_pool_is_refused(pool) -> None:
    with pytest.raises(ConfigError, match=r"device 4 is outside the devices that num_devices=4 gives \(0 to 3\)"):
        pool.group(DeviceSet("device", (4,)))


def test_a_submitted_call_runs_while_the_driver_goes_on(camera) -> None:
    started = time.monotonic()
    pending = submit(camera.nap, 1.5)
    assert time.monotonic() - started < 1.4
    assert pending.result(300.0) == 1.5


def test_submitted_calls_run_one_after_another(camera) -> None:
    started = time.monotonic()
    submit(camera.nap, 0.3)
    assert submit(camera.nap, 0.0).result(300.0) == 0.0
    assert time.monotonic() - started >= 0.3


def test_a_call_past_its_deadline_says_where_it_stands(pool, camera, tmp_path) -> None:
    pool.stack_dir = tmp_path
    pending = submit(camera.nap, 2.0)
    time.sleep(0.3)
    with pytest.raises(StallError, match=r"camera.nap made no progress for 0.05 s(.|\n)*roles.py:\d+ in nap") as caught:
        pending.result(0.05)
    pool.stack_dir = None
    assert caught.value.code == 8001 and caught.value.exit_status == 8
    assert any("in nap" in file.read_text() for file in tmp_path.glob("stacks-*/*.txt"))
    assert pending.result(300.0) == 2.0


def test_a_call_that_takes_thrice_its_deadline_returns_as_long_as_it_makes_progress(camera) -> None:
    assert submit(camera.crawl, 0.1, 45).result(1.5) == 45


def test_a_call_that_stops_making_progress_is_named_within_its_deadline(pool, camera, tmp_path) -> None:
    pool.stack_dir = tmp_path
    pending = submit(camera.crawl, 0.1, 8, 6.0)
    last = r"last progress [\d.]+ s ago: crawled a step \(time 8\)"
    with pytest.raises(StallError, match=rf"camera.crawl made no progress for 0.5 s(.|\n)*{last}") as caught:
        pending.result(0.5)
    pool.stack_dir = None
    assert "Raise stall_timeout_s" in str(caught.value)
    assert pending.result(300.0) == 8


def test_cleared_workers_take_new_roles(pool, device_set, camera) -> None:
    before = camera.pids()
    pool.clear()
    camera = pool.group(device_set).place(Remote("camera", Camera))
    assert camera.pids() == before
    assert camera.total() == sum(range(1, len(device_set.indices) + 1))


def test_a_column_is_read_on_another_device_set(pool, device_set, camera) -> None:
    shots = camera.shoot(ids(4))
    viewer = pool.group(DeviceSet("cpu", (0,))).place(Remote("viewer", Camera))
    before = pool.traffic
    assert viewer.develop(shots.select([3, 0])).tolist() == [3, 0]
    assert pool.traffic - before < 10_000


def test_a_local_group_has_one_worker(local_pool) -> None:
    with pytest.raises(ConfigError, match=r"devices 0-1 needs 2 workers.*Set runtime=ray"):
        local_pool.group(DeviceSet("device", (0, 1)))


# Ray alone


def test_workers_are_processes_that_keep_the_cores_to_themselves(ray_pool) -> None:
    camera = ray_pool.group(DeviceSet("device", (0, 1))).place(Remote("camera", Camera))
    assert len({os.getpid(), *camera.pids()}) == 3
    assert camera.threads() == [1, 1]


def test_ray_answers_on_loopback_alone(ray_pool) -> None:
    assert ray_pool.group(DeviceSet("device", (0, 1))).hosts == ("127.0.0.1",) * 2


def test_rows_are_cut_by_update_first_and_by_rank_second(ray_pool) -> None:
    camera = ray_pool.group(DeviceSet("device", (0, 1))).place(Remote("camera", Camera))
    ray_pool.num_updates = 2
    try:
        assert camera.rows_of_ranks(ids(8)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert torch.equal(camera.shoot(ids(8)).ids, torch.arange(8))
    finally:
        ray_pool.num_updates = 1


def test_groups_share_all_workers_or_none(ray_pool) -> None:
    ray_pool.group(DeviceSet("device", (0, 1)))
    with pytest.raises(ConfigError, match="devices 0-1 and on devices 1-2 share some devices but not all"):
        ray_pool.group(DeviceSet("device", (1, 2)))


@pytest.mark.slow
def test_two_groups_on_the_same_devices_have_processes_of_their_own(ray_pool) -> None:
    device_sets = [DeviceSet("device", (0, 1)), DeviceSet("device", (0, 1), process=1)]
    one, other = (ray_pool.group(device_set).place(Remote("camera", Camera)) for device_set in device_sets)
    assert len({*one.pids(), *other.pids()}) == 4
    assert one.total() == other.total() == 3.0
    assert other.threads() == one.threads()
    assert other.develop(one.shoot(ids(4))).tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="share some devices but not all"):
        ray_pool.group(DeviceSet("device", (1, 2), process=1))


@pytest.mark.slow
def test_a_second_process_ends_when_its_device_gets_another_first(ray_pool) -> None:
    first, second = (WorkerLocation("device", 0, process) for process in (0, 1))
    old = [ray_pool.worker(place) for place in (first, second)]
    ray_pool.clear()
    assert [ray_pool.worker(place) for place in (first, second)] == old
    ray_pool.kill(old[:1])
    new = [ray_pool.worker(place) for place in (second, first)]
    assert not set(new) & set(old)
    assert str(new[0]).startswith("the worker on device 0 process 1 (")


@pytest.mark.slow
def test_groups_of_other_slabs_reuse_the_workers(ray_pool) -> None:
    two = ray_pool.group(DeviceSet("device", (0, 1))).place(Remote("camera", Camera)).pids()
    ray_pool.clear()
    four = ray_pool.group(DeviceSet("device", (0, 1, 2, 3))).place(Remote("camera", Camera))
    assert four.pids()[:2] == two and four.total() == 10.0
    ray_pool.clear()
    pairs = [ray_pool.group(DeviceSet("device", pair)).place(Remote("camera", Camera)) for pair in ((0, 1), (2, 3))]
    assert [pair.total() for pair in pairs] == [3.0, 3.0]
    assert pairs[1].develop(pairs[0].shoot(ids(4))).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_memory_of_workers_is_known(ray_pool) -> None:
    group = ray_pool.group(DeviceSet("device", (0, 1)))
    group.hosts  # noqa: B018 - waits for the workers
    peak = ray_pool.memory()["mem/host_peak_gib"]
    assert 0.1 < peak < 8.0
