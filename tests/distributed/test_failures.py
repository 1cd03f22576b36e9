"""A worker that fails, dies or hangs: the driver says which one and why, soon, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.roles import Camera, Saboteur, ids
from tests.processes import is_running, wait_until
from unirl.config.errors import ConfigError, DataError, DependencyError, ResourceError, StallError, WorkerError
from unirl.distributed.group import Remote, Slab
from unirl.distributed.group.failures import Failure, first_cause
from unirl.distributed.group.ray_cluster import check_interpreter, check_version, reserve
from unirl.distributed.group.ray_pool import RayPool
from unirl.distributed.group.stacks import watchdog

PAIR = Slab("device", (0, 1))


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
    with pytest.raises(DataError):
        saboteur.fail()
    assert len(ray_pool.crew.members) == 2
    with pytest.raises(DataError):
        saboteur.fail()


def test_an_exception_beside_a_collective_is_the_one_that_is_raised(saboteur) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"saboteur.fail_on_last failed on the worker on device 1.*'of rank 1'"):
        saboteur.fail_on_last()
    assert time.monotonic() - started < 10


def test_a_killed_worker_is_named_while_the_other_waits_for_it(ray_pool, saboteur, tmp_path) -> None:
    started = tmp_path / "pid"
    pending = saboteur.die_on_last.submit(str(started))
    assert wait_until(lambda: started.exists() and started.read_text() != "", 20)
    pid = int(started.read_text())
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"the worker on device 1 \(host .*, pid {pid}\) died while saboteur.die_on"):
        pending.result()
    assert time.monotonic() - killed < 15


@pytest.mark.slow
def test_a_worker_that_dies_between_calls_is_named_by_the_next(ray_pool) -> None:
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    pids = camera.pids()
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: not is_running(pids[0]), 5)
    with pytest.raises(WorkerError, match=rf"worker on device 0 .*pid {pids[0]}\) died"):
        camera.total()


@pytest.mark.slow
def test_a_death_in_another_group_ends_the_wait(ray_pool) -> None:
    waiting = ray_pool.group(Slab("device", (0,))).place(Remote("camera", Camera))
    dying = ray_pool.group(Slab("device", (1,))).place(Remote("saboteur", Saboteur))
    started = time.monotonic()
    pending = waiting.nap.submit(30.0)
    dying.vanish.submit()
    with pytest.raises(WorkerError, match=r"the worker on device 1 .* died while camera.nap ran"):
        pending.result()
    assert time.monotonic() - started < 15


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
def test_a_deadlock_ends_with_the_stacks_of_all_ranks(ray_pool, saboteur, tmp_path) -> None:
    ray_pool.stack_dir = tmp_path
    try:
        with ray_pool.watch("train"), pytest.raises(StallError) as caught:
            saboteur.deadlock.submit().result(2.0)
    finally:
        ray_pool.stack_dir = None
    message = str(caught.value)
    assert "saboteur.deadlock (phase train) gave no result within 2 s" in message
    assert "worker on device 0" in message and "threading.py" in message
    assert "worker on device 1" in message and "in all_reduce" in message
    [folder] = tmp_path.iterdir()
    assert str(folder) in message
    stacks = {file.name: file.read_text() for file in folder.iterdir()}
    assert stacks.keys() == {"device-0.txt", "device-1.txt"}
    assert "in deadlock\n" in stacks["device-0.txt"] and "in sum_over_dp\n" in stacks["device-1.txt"]
    stuck = [member.about.pid for member in ray_pool.crew.members.values()]
    ray_pool.crew.kill(list(ray_pool.crew.members.values()))
    assert wait_until(lambda: not any(map(is_running, stuck)), 5)


@pytest.mark.slow
def test_a_frozen_worker_is_said_not_to_answer(ray_pool, tmp_path) -> None:
    camera = ray_pool.group(PAIR).place(Remote("camera", Camera))
    frozen = camera.pids()[1]
    os.kill(frozen, signal.SIGSTOP)
    ray_pool.stack_dir = tmp_path
    try:
        with pytest.raises(StallError, match=rf"pid {frozen}\): did not answer within 5 s"):
            camera.nothing.submit().result(1.0)
    finally:
        ray_pool.stack_dir = None
        ray_pool.crew.kill([m for m in ray_pool.crew.members.values() if m.about.pid == frozen])
    assert wait_until(lambda: not is_running(frozen), 5)


def test_the_first_cause_is_a_death_then_the_earliest_that_is_no_broken_collective() -> None:
    broken = Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "a.b", "rank 0")
    early, late = (Failure.of(KeyError(name), "a.b", name) for name in ("early", "late"))
    death = Failure.death("a.b", "rank 3", "killed")
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
    with pytest.raises(DependencyError, match=r"/home/a user/.*has a blank in it.*runtime=local"):
        check_interpreter("/home/a user/.venv/bin/python")
    check_interpreter(sys.executable.replace(" ", "_"))


def test_devices_that_the_cluster_lacks_are_counted(ray_session) -> None:
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"1 machine\(s\) with 64 CPU slots each are asked for.* 16 CPU"):
        RayPool(64)
    with pytest.raises(ResourceError, match=r"2 machine\(s\) with 2 CPU slots each are asked for"):
        RayPool(4, devices_per_node=2)
    with pytest.raises(ConfigError, match="num_devices=4 is no multiple of devices_per_node=3"):
        reserve(4, 3)
    assert time.monotonic() - started < 3


@pytest.mark.slow
def test_a_pool_without_its_cluster_is_refused_in_seconds() -> None:
    done = drive(
        """
import time
from unirl.config.errors import DependencyError
from unirl.distributed.group import open_pool
started = time.monotonic()
try:
    open_pool("ray", 2)
except DependencyError as error:
    print(time.monotonic() - started, error.code)
""",
        RAY_ADDRESS="127.0.0.1:1",
    )
    seconds, code = done.stdout.split()
    assert float(seconds) < 5 and code == "3003"


# Nothing is left


def drive(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A driver of its own."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **variables}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from tests.distributed.roles import Saboteur
from unirl.distributed.group import Remote, Slab
from unirl.distributed.group.ray_cluster import descendants
from unirl.distributed.group.ray_pool import RayPool

def freeze_agents():
    agents = [pid for pid in descendants([os.getpid()]) if b"Agent" in Path(f"/proc/{{pid}}/cmdline").read_bytes()]
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)

pool = RayPool(2, deadline_s=60.0, preload=())
saboteur = pool.group(Slab("device", (0, 1))).place(Remote("saboteur", Saboteur))
saboteur.deadlock.submit()
{then}
"""


def family(mark: str) -> list[int]:
    """The processes whose environment has a mark, which children inherit."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and is_running(int(folder.name)):
                found.append(int(folder.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        "pool.close(); pool.close(); Path(sys.argv[1]).touch(); time.sleep(60)",
        "Path(sys.argv[1]).touch(); os.kill(os.getpid(), signal.SIGKILL)",
        "freeze_agents(); Path(sys.argv[1]).touch(); os.kill(os.getpid(), signal.SIGKILL)",
        "Path(sys.argv[1]).touch(); os.kill(os.getpid(), signal.SIGTERM)",
        "Path(sys.argv[1]).touch(); raise RuntimeError",
    ],
    ids=["close", "sigkill", "sigkill-frozen-agents", "sigterm", "exception"],
)
def test_no_process_is_left(then, tmp_path) -> None:
    mark = f"UNIRL_TEST_MARK={tmp_path}"
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(then=then), str(tmp_path / "done")],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "UNIRL_TEST_MARK": str(tmp_path)},
    )
    try:
        assert wait_until((tmp_path / "done").exists, 90)
        assert wait_until(lambda: set(family(mark)) <= {child.pid}, 5), family(mark)
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_reaches_the_driver_alone(tmp_path) -> None:
    then = """
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(os.getpgid(0), signal.SIGINT)
time.sleep(1.0)
print(json.dumps([os.path.exists(f"/proc/{member.about.pid}") for member in pool.crew.members.values()]))
pool.close()
"""
    child = subprocess.run(
        [sys.executable, "-c", DRIVER.format(then=then)],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    # Ray may print of the workers that close() ends.
    said = [line for line in child.stdout.splitlines() if line.startswith(("[true", "[false"))]
    assert said == ["[true, true]"], child.stdout + child.stderr


# The local runtime


def test_a_phase_that_hangs_in_this_process_ends_it_with_its_stacks(tmp_path) -> None:
    done = drive(f"""
import threading
from pathlib import Path
from unirl.distributed.group.stacks import watchdog
with watchdog("phase train", 0.2, Path({str(tmp_path)!r})):
    threading.Event().wait()
""")
    assert done.returncode == StallError.exit_status == 8
    assert "error[8001]: phase train gave no result within 0.2 s" in done.stderr
    [stacks] = tmp_path.glob("*/driver.txt")
    assert "threading.Event().wait()" in stacks.read_text() or "in wait" in stacks.read_text()


def test_a_phase_that_ends_in_time_is_left_alone(tmp_path) -> None:
    with watchdog("phase train", 0.05, tmp_path):
        pass
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_submitted_call_that_hangs_does_not_keep_the_process_alive() -> None:
    started = time.monotonic()
    done = drive("""
from tests.distributed.roles import Saboteur
from unirl.distributed.group import Remote, Slab, open_pool
pool = open_pool("local", 1)
pool.group(Slab("device", (0,))).place(Remote("saboteur", Saboteur)).deadlock.submit()
pool.close()
""")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 30


# Several machines, played by several nodes on this one

NODES = """
import os, signal, time
from ray.cluster_utils import Cluster
from tests.distributed.roles import Camera, ids
from unirl.config.errors import WorkerError
from unirl.distributed.group import Remote, Slab
from unirl.distributed.group.ray_cluster import HEALTH
from unirl.distributed.group.ray_pool import RayPool

small = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**small, "_system_config": HEALTH})
os.environ["RAY_ADDRESS"] = cluster.address
for number in (signal.SIGKILL, signal.SIGSTOP):
    node = cluster.add_node(**small)
    pool = RayPool(4, devices_per_node=2, deadline_s=60.0, preload=())
    camera = pool.group(Slab("device", (0, 1, 2, 3))).place(Remote("camera", Camera))
    assert camera.total() == 10.0
    assert camera.develop(camera.shoot(ids(8))).tolist() == list(range(8))
    pending = camera.nap.submit(40.0)
    time.sleep(0.5)
    [raylet] = [p.process for kind in node.all_processes.values() for p in kind if "raylet/raylet" in p.process.args[0]]
    started = time.monotonic()
    os.kill(raylet.pid, number)
    try:
        pending.result()
    except WorkerError as error:
        print(number.name, f"{time.monotonic() - started:.1f}", error, flush=True)
    pool.close()
    raylet.kill()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_machine_that_is_lost_is_noticed_killed_or_frozen() -> None:
    done = drive(NODES)
    said = re.findall(r"^(\w+) (\S+) the worker on device \d .* died while camera.nap ran: ", done.stdout, re.MULTILINE)
    assert [name for name, _ in said] == ["SIGKILL", "SIGSTOP"], done.stdout + done.stderr
    assert all(float(seconds) < 15 for _, seconds in said), said


GPUS = """
import ray
from tests.distributed.roles import Camera
from unirl.distributed.group import Remote, Slab
from unirl.distributed.group.ray_pool import RayPool

ray.init(num_gpus=2, num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="ERROR")
pool = RayPool(2, preload=())
slabs = [Slab("device", (0,)), Slab("device", (1,)), Slab("cpu", (0, 1))]
print("apart", [pool.group(slab).place(Remote("camera", Camera)).visible() for slab in slabs])
pool.clear()
slabs = [Slab("device", (0, 1)), Slab("device", (0, 1), process=1)]
first, second = (pool.group(slab).place(Remote("camera", Camera)) for slab in slabs)
assert len({*first.pids(), *second.pids()}) == 4
print("beside", first.visible() == second.visible(), sorted(second.visible()))
pool.close()
assert ray.is_initialized()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def said_on_gpus() -> dict[str, str]:
    """What a driver whose Ray counts two GPUs saw of them, by the name of the question."""
    done = drive(GPUS)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("apart", "beside")))


@pytest.mark.slow
def test_devices_are_gpus_where_the_cluster_has_them(said_on_gpus) -> None:
    assert said_on_gpus["apart"] in ("[['0'], ['1'], ['', '']]", "[['1'], ['0'], ['', '']]")


@pytest.mark.slow
def test_a_second_process_sees_the_gpu_of_the_first(said_on_gpus) -> None:
    assert said_on_gpus["beside"] == "True ['0', '1']"
