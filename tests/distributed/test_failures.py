"""A worker that fails, dies or hangs: the driver says which one and why, soon, and leaves no process behind."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.distributed.roles import Camera, Saboteur, ids
from tests.processes import is_running, wait_until
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import ConfigError, DataError, DependencyError, ResourceError, StallError, WorkerError
from unirl.distributed.group import ray_cluster
from unirl.distributed.group.deadlines import ENOUGH, LearnedDeadlines
from unirl.distributed.group.failures import WorkerFailure, first_cause
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_cluster import check_interpreter, check_version, reserve
from unirl.distributed.group.ray_pool import RayPool

PAIR = DeviceSet("device", (0, 1))


@pytest.fixture
def saboteur(ray_pool):
    return ray_pool.group(PAIR).place(Remote("saboteur", Saboteur))


# What the driver raises


def test_an_error_of_ours_arrives_as_it_was_raised(saboteur) -> None:
    with pytest.raises(DataError, match="the prompt is empty") as caught:
        saboteur.fail()
    assert caught.value.code == 4002
    assert "in fail\n" in str(caught.value.__cause__)
    assert "saboteur.fail on the worker on device" in caught.value.__notes__[0]


def test_any_other_exception_names_worker_and_call(saboteur) -> None:
    with pytest.raises(WorkerError, match=r"saboteur.crash failed on the worker on device \d \(host .*, pid \d+\): K"):
        saboteur.crash()


def test_running_out_of_memory_stays_what_it_is(saboteur) -> None:
    with pytest.raises(MemoryError):
        saboteur.exhaust()


def test_a_result_that_cannot_travel_is_a_failure_of_the_call(saboteur) -> None:
    with pytest.raises(WorkerError, match=r"saboteur.unpicklable failed on .*(.|\n)*pickle"):
        saboteur.unpicklable()


def test_ranks_that_fail_together_can_be_called_again(ray_pool, saboteur) -> None:
    workers = list(ray_pool.worker_refs)
    with pytest.raises(DataError):
        saboteur.fail()
    assert list(ray_pool.worker_refs) == workers
    with pytest.raises(DataError):
        saboteur.fail()


def test_an_exception_beside_a_collective_is_the_one_that_is_raised(saboteur) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"saboteur.fail_on_last failed on the worker on device 1.*'of rank 1'"):
        saboteur.fail_on_last()
    assert time.monotonic() - started < 120


def test_a_killed_worker_is_named_while_the_other_waits_for_it(ray_pool, saboteur, tmp_path) -> None:
    started = tmp_path / "pid"
    pending = submit(saboteur.die_on_last, str(started))
    assert wait_until(lambda: started.exists() and started.read_text() != "", 300)
    pid = int(started.read_text())
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"the worker on device 1 \(host .*, pid {pid}\) died while saboteur.die_on"):
        pending.result()
    assert time.monotonic() - killed < 120


@pytest.mark.slow
def test_a_worker_that_dies_between_calls_is_named_by_the_next(ray_pool) -> None:
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    pids = camera.pids()
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: not is_running(pids[0]), 60)
    with pytest.raises(WorkerError, match=rf"worker on device 0 .*pid {pids[0]}\) died"):
        camera.total()


@pytest.mark.slow
def test_a_death_in_another_group_ends_the_wait(ray_pool) -> None:
    waiting = ray_pool.group(DeviceSet("device", (0,))).place(Remote("camera", Camera))
    dying = ray_pool.group(DeviceSet("device", (1,))).place(Remote("saboteur", Saboteur))
    started = time.monotonic()
    pending = submit(waiting.nap, 600.0)
    submit(dying.vanish)
    with pytest.raises(WorkerError, match=r"the worker on device 1 .* died while camera.nap ran"):
        pending.result()
    assert time.monotonic() - started < 120


@pytest.mark.slow
def test_workers_are_replaced_after_a_death(ray_pool) -> None:
    group = ray_pool.group(PAIR)
    with pytest.raises(WorkerError, match="died"):
        group.place(Remote("saboteur", Saboteur)).vanish()
    ray_pool.clear()
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    assert camera.total() == 3.0
    assert camera.develop(camera.shoot(ids(4))).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_worker_that_starts_may_take_longer_than_earlier_calls(ray_pool, monkeypatch) -> None:
    for name, seconds in {"deadlines.LEAST_S": 0.2, "ray_pool.ANSWER_S": 0.1}.items():  # a start takes seconds
        monkeypatch.setattr(f"unirl.distributed.group.{name}", seconds)
    for _ in range(ENOUGH):
        ray_pool.group(PAIR).place(Remote("camera", Camera))
        ray_pool.clear()
    assert ray_pool.learned.limit_s("starting the workers") < 60.0
    ray_pool.kill([worker for worker in ray_pool.worker_refs.values() if worker.location.index == 1])
    ray_pool.clear()
    assert ray_pool.group(PAIR).place(Remote("camera", Camera)).total() == 3.0


@pytest.mark.slow
def test_a_deadlock_ends_with_the_stacks_of_all_ranks(ray_pool, saboteur, tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setattr("unirl.distributed.group.ray_pool.ANSWER_S", 120.0)  # workers of a busy machine answer late
    tmp_path, begun = tmp_path_factory.mktemp("stacks"), tmp_path_factory.mktemp("begun")
    ray_pool.stack_dir = tmp_path
    try:
        with ray_pool.watch("train"), pytest.raises(StallError) as caught:
            pending = submit(saboteur.deadlock, str(begun))
            # The limit begins when both ranks wait, so it says nothing about how fast they got there.
            assert wait_until(lambda: len(list(begun.iterdir())) == 2, 300)
            pending.result(2.0)
    finally:
        ray_pool.stack_dir = None
    message = str(caught.value)
    assert "saboteur.deadlock (phase train) made no progress for 2 s on rank 0, the worker on device 0" in message
    assert "worker on device 0" in message and "threading.py" in message
    assert "worker on device 1" in message and "in all_reduce" in message
    [folder] = tmp_path.iterdir()
    assert str(folder) in message
    stacks = {file.name: file.read_text() for file in folder.iterdir()}
    assert stacks.keys() == {"device-0.txt", "device-1.txt"}
    assert "in deadlock\n" in stacks["device-0.txt"] and "in sum_over_dp\n" in stacks["device-1.txt"]
    stuck = [worker.process_info.pid for worker in ray_pool.worker_refs.values()]
    ray_pool.kill(list(ray_pool.worker_refs.values()))
    assert wait_until(lambda: not any(map(is_running, stuck)), 60)


@pytest.mark.slow
def test_a_frozen_worker_is_said_not_to_answer(ray_pool, tmp_path) -> None:
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    frozen = camera.pids()[1]
    os.kill(frozen, signal.SIGSTOP)
    ray_pool.stack_dir = tmp_path
    try:
        with pytest.raises(StallError, match=rf"pid {frozen}\): did not answer within 5 s"):
            submit(camera.nothing).result(1.0)
    finally:
        ray_pool.stack_dir = None
        ray_pool.kill([m for m in ray_pool.worker_refs.values() if m.process_info.pid == frozen])
    assert wait_until(lambda: not is_running(frozen), 60)


@pytest.mark.slow
def test_a_frozen_worker_is_found_by_the_durations_of_earlier_calls_and_a_slow_one_is_not(
    ray_pool, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("unirl.distributed.group.deadlines.LEAST_S", 2.0)
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    for _ in range(ENOUGH):
        camera.nap(0.01)
    camera.nap(4.0)  # silent for longer than the learned limit, but it answers
    frozen = camera.pids()[1]
    os.kill(frozen, signal.SIGSTOP)
    ray_pool.stack_dir = tmp_path
    begin = time.monotonic()
    try:
        # The limit is ten medians of the earlier calls, and these take longer on a busy machine.
        with pytest.raises(StallError, match=rf"no progress for \d+ s on rank 1, .*pid {frozen}\)"):
            submit(camera.nap, 0.01).result(600.0)
    finally:
        ray_pool.stack_dir = None
        ray_pool.kill([m for m in ray_pool.worker_refs.values() if m.process_info.pid == frozen])
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("durations", "limit"),
    [([], math.inf), ([1.0, 1.0], math.inf), ([1.0, 2.0, 900.0], 60.0), ([30.0, 10.0, 20.0], 200.0)],
)
def test_the_learned_limit_is_ten_medians_and_at_least_a_minute(durations, limit) -> None:
    learned = LearnedDeadlines()
    for seconds in durations:
        learned.note("policy.train", seconds)
    assert learned.limit_s("policy.train") == limit
    assert learned.limit_s("policy.save") == math.inf


def test_the_first_cause_is_a_death_then_the_earliest_that_is_no_broken_collective() -> None:
    broken = WorkerFailure.of(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "a.b", "rank 0")
    early, late = (WorkerFailure.of(KeyError(name), "a.b", name) for name in ("early", "late"))
    death = WorkerFailure(what="a.b", worker="rank 3", message="killed", is_death=True)
    assert first_cause([broken, late, early]) is early
    assert first_cause([broken, late, early, death]) is death
    assert first_cause([broken]) is broken


# Before anything runs


def test_an_old_ray_is_refused() -> None:
    with pytest.raises(DependencyError, match=r"needs ray >= 2.54, and 2.40.1 is installed") as caught:
        check_version("2.40.1")
    assert caught.value.code == 3002
    check_version("2.54.0")
    check_version("3.0.0.dev0")


def test_an_interpreter_that_ray_cannot_start_is_refused() -> None:
    with pytest.raises(DependencyError, match=r"/home/a user/.*contains a space.*runtime=local"):
        check_interpreter("/home/a user/.venv/bin/python")
    check_interpreter(sys.executable.replace(" ", "_"))


@pytest.mark.parametrize(
    ("error", "tries"), [("The current node timed out during startup.", 2), ("no port is free", 1)]
)
def test_ray_gets_a_second_try_when_it_was_too_slow_to_start(error: str, tries: int, monkeypatch) -> None:
    done: list[int] = []

    def fails(num_cpus: int) -> None:
        done.append(num_cpus)
        raise Exception(error)

    monkeypatch.setattr(ray_cluster, "_init", fails)
    monkeypatch.setattr(ray_cluster, "shut_down", lambda: None)
    monkeypatch.setattr(ray_cluster, "_is_shutting_down", threading.Event())
    with pytest.raises(ResourceError, match=f"Ray did not start on this machine: .*{error}"):
        ray_cluster.start(1)
    assert done == [1] * tries


def test_devices_that_the_cluster_lacks_are_counted(ray_session) -> None:
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"1 machine\(s\) with 64 CPU slots each, .* 16 CPU"):
        RayPool(64)
    with pytest.raises(ResourceError, match=r"2 machine\(s\) with 2 CPU slots each, "):
        RayPool(4, devices_per_node=2)
    with pytest.raises(ConfigError, match="num_devices=4 must be a multiple of devices_per_node=3"):
        reserve(4, 3)
    assert time.monotonic() - started < 60


def test_workers_with_different_devices_are_refused_before_a_role_is_built(ray_pool, monkeypatch) -> None:
    ask = ray_pool.ask

    def mixed(workers, what, method, *args):
        answers = ask(workers, what, method, *args)
        return [replace(answers[0], name="NVIDIA A100"), *answers[1:]] if method == "device_kind" else answers

    monkeypatch.setattr(ray_pool, "ask", mixed)
    group = ray_pool.group(PAIR)
    with pytest.raises(DependencyError, match=r"devices 0-1 .*\(NVIDIA A100: device 0 of \S+; cpu: device 1 of"):
        group.place(Remote("camera", Camera))
    one = ray_pool.group(DeviceSet("device", (2,))).place(Remote("camera", Camera))
    assert one.total() == 1.0
    monkeypatch.setattr(ray_pool, "allow_mixed_devices", True)
    assert group.place(Remote("camera", Camera)).total() == 3.0


def test_workers_report_the_imports_of_a_call(ray_pool, tmp_path) -> None:
    camera = ray_pool.group(DeviceSet("device", (0,))).place(Remote("camera", Camera))
    (tmp_path / "library_of_one_test.py").write_text(
        "from unirl.types.progress import heartbeat\nSEEN = heartbeat().what\n"
    )
    assert camera.last_progress_inside(str(tmp_path), "library_of_one_test") == "import of library_of_one_test"


def test_a_device_that_is_too_small_is_refused_before_a_role_is_built(ray_pool, monkeypatch) -> None:
    seen = []

    def refuse(devices, kind):
        seen.append((devices, kind.name))
        raise ResourceError("too small")

    monkeypatch.setattr(ray_pool, "check_device", refuse)
    with pytest.raises(ResourceError, match="too small"):
        ray_pool.group(DeviceSet("device", (2,))).place(Remote("camera", pytest.fail))
    assert seen == [(DeviceSet("device", (2,)), "cpu")]
