"""Drivers in processes of their own: however they end, nothing is left; a machine that is lost; what a worker sees."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.processes import is_running, run_python, wait_until
from tests.source_tree import ROOT
from tests.warm_ray_worker import SOCKET
from tests.warm_servers import WarmProcess
from unirl.config.errors import StallError
from unirl.distributed.group.failures import watchdog

pytestmark = pytest.mark.usefixtures("warm_ray_workers")


def drive(script: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Exit status and output of a driver in a process of its own."""
    (folder / "driver.py").write_text(script)
    return run_python(["driver.py"], folder, {"PYTHONPATH": str(ROOT), **variables})


@pytest.mark.slow
def test_a_pool_without_its_cluster_is_refused_in_seconds(tmp_path) -> None:
    _, output = drive(
        """
import time
from unirl.config.errors import DependencyError
from unirl.distributed.group.pool import open_pool
started = time.monotonic()
try:
    open_pool("ray", 2)
except DependencyError as error:
    print(time.monotonic() - started, error.code)
""",
        tmp_path,
        RAY_ADDRESS="127.0.0.1:1",
    )
    seconds, code = output.split()
    assert float(seconds) < 60 and code == "3003"


# Nothing is left

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from tests.distributed.roles import Saboteur
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_cluster import descendants
from unirl.distributed.group.ray_pool import RayPool

def freeze_agents():
    agents = [pid for pid in descendants([os.getpid()]) if b"Agent" in Path(f"/proc/{{pid}}/cmdline").read_bytes()]
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)

pool = RayPool(2, deadline_s=600.0, preload=())
saboteur = pool.group(DeviceSet("device", (0, 1))).place(Remote("saboteur", Saboteur))
submit(saboteur.deadlock)
{then}
"""


def family(mark: str) -> list[int]:
    """The processes whose environment has a mark, which children inherit."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and is_running(int(folder.name)):
                result.append(int(folder.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        "pool.close(); pool.close(); Path(sys.argv[1]).touch(); time.sleep(60)",
        "freeze_agents(); Path(sys.argv[1]).touch(); os.kill(os.getpid(), signal.SIGKILL)",
        "Path(sys.argv[1]).touch(); os.kill(os.getpid(), signal.SIGTERM)",
        "Path(sys.argv[1]).touch(); raise RuntimeError",
    ],
    ids=["close", "sigkill-frozen-agents", "sigterm", "exception"],
)
def test_no_process_is_left(then, tmp_path) -> None:
    mark = f"UNIRL_TEST_MARK={tmp_path}"
    driver = cold_driver(then, tmp_path, UNIRL_TEST_MARK=str(tmp_path))
    try:
        assert wait_until((tmp_path / "done").exists, 600)
        assert wait_until(lambda: set(family(mark)) <= {driver.pid}, 60), family(mark)
    finally:
        driver.kill()


def cold_driver(then: str, folder: Path, **variables: str) -> WarmProcess:
    """A driver that leads a session. Its workers are started by Ray itself, as its children."""
    (folder / "driver.py").write_text(DRIVER.format(then=then))
    environment = {name: value for name, value in os.environ.items() if name != SOCKET}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    return WarmProcess([str(folder / "driver.py"), str(folder / "done")], folder / "output", environment)


@pytest.mark.slow
def test_ray_reports_no_worker_that_close_ends(tmp_path) -> None:
    """The cluster gets five seconds to tell of the workers that were killed."""
    then = "pool.join_threads = lambda seconds: time.sleep(5.0); pool.close(); print('closed')"
    _, output = drive(DRIVER.format(then=then), tmp_path)
    assert output.splitlines() == ["closed"], output


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_reaches_the_driver_alone(tmp_path) -> None:
    then = """
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(os.getpgid(0), signal.SIGINT)
time.sleep(1.0)
pids = [worker.process_info.pid for worker in pool.worker_refs.values()]
print(json.dumps([os.path.exists(f"/proc/{pid}") for pid in pids]))
pool.close()
"""
    driver = cold_driver(then, tmp_path)
    driver.wait(600)
    output = (tmp_path / "output").read_text()
    assert [line for line in output.splitlines() if line.startswith(("[true", "[false"))] == ["[true, true]"], output


# The local runtime


def test_a_phase_that_hangs_in_this_process_ends_it_with_its_stacks(tmp_path) -> None:
    status, output = drive(
        f"""
import threading
from pathlib import Path
from unirl.distributed.group.failures import watchdog
with watchdog("phase train", 0.2, Path({str(tmp_path)!r})):
    threading.Event().wait()
""",
        tmp_path,
    )
    assert status == StallError.exit_status == 8
    assert "error[8001]: phase train made no progress for 0.2 s" in output
    [stacks] = tmp_path.glob("*/driver.txt")
    assert "threading.Event().wait()" in stacks.read_text() or "in wait" in stacks.read_text()


def test_a_phase_that_makes_progress_may_take_longer_than_the_deadline(tmp_path) -> None:
    status, output = drive(
        f"""
import time
from pathlib import Path
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.pool import open_pool
from tests.distributed.roles import Camera
pool = open_pool("local", 1, deadline_s=0.5)
pool.stack_dir = Path({str(tmp_path)!r})
camera = pool.group(DeviceSet("device", (0,))).place(Remote("camera", Camera))
with pool.watch("generate"):
    assert camera.crawl(0.1, 15) == 15  # in the driver's thread
    assert submit(camera.crawl, 0.1, 15).result() == 15
print("done")
with pool.watch("reward"):
    camera.crawl(0.1, 3, 30.0)
""",
        tmp_path,
    )
    assert "done" in output and status == StallError.exit_status
    assert "phase reward made no progress for 0.5 s" in output and "crawled a step (time 3)" in output


def test_a_phase_that_ends_in_time_is_left_alone(tmp_path) -> None:
    with watchdog("phase train", 0.05, tmp_path):
        pass
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_submitted_call_that_hangs_does_not_keep_the_process_alive(tmp_path) -> None:
    started = time.monotonic()
    status, output = drive(
        """
from tests.distributed.roles import Saboteur
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.pool import open_pool
pool = open_pool("local", 1)
saboteur = pool.group(DeviceSet("device", (0,))).place(Remote("saboteur", Saboteur))
submit(saboteur.deadlock)
pool.close()
""",
        tmp_path,
    )
    assert status == 0, output
    assert time.monotonic() - started < 300


# Several machines, played by several nodes on this one

NODES = """
import os, signal, time
from ray.cluster_utils import Cluster
from tests.distributed.roles import Camera, ids
from tests.warm_ray import warm_nodes
from unirl.config.errors import WorkerError
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_cluster import HEALTH
from unirl.distributed.group.ray_pool import RayPool

small = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
with warm_nodes():
    cluster = Cluster(initialize_head=True, head_node_args={**small, "_system_config": HEALTH})
os.environ["RAY_ADDRESS"] = cluster.address
for number, per_node in ((signal.SIGKILL, 2), (signal.SIGSTOP, 1)):
    with warm_nodes():
        node = cluster.add_node(**small)
    devices = tuple(range(2 * per_node))
    pool = RayPool(len(devices), devices_per_node=per_node, deadline_s=600.0, preload=())
    camera = pool.group(DeviceSet("device", devices)).place(Remote("camera", Camera))
    assert camera.total() == sum(rank + 1.0 for rank in devices)
    assert camera.develop(camera.shoot(ids(8))).tolist() == list(range(8))
    pending = submit(camera.nap, 600.0)
    time.sleep(0.5)
    [raylet] = [p.process for kind in node.all_processes.values() for p in kind if "raylet/raylet" in p.process.args[0]]
    started = time.monotonic()
    os.kill(raylet.pid, number)
    try:
        pending.result()
    except WorkerError as error:
        print(number.name, f"{time.monotonic() - started:.1f}", error, flush=True)
    pool.close()
    assert os.path.exists(cluster.head_node.get_session_dir_path() + "/sockets/raylet"), "the cluster is not ours"
    raylet.kill()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_machine_that_is_lost_is_noticed_killed_or_frozen(tmp_path) -> None:
    _, output = drive(NODES, tmp_path)
    said = re.findall(r"^(\w+) (\S+) the worker on device \d .* died while camera.nap ran: ", output, re.MULTILINE)
    assert [name for name, _ in said] == ["SIGKILL", "SIGSTOP"], output
    assert all(float(seconds) < 150 for _, seconds in said), said


RAYLET = """
import os
import signal
import time
from pathlib import Path

from ray._private import worker
from tests.distributed.roles import Camera
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import WorkerError
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_cluster import shut_down
from unirl.distributed.group.ray_pool import RayPool

pool = RayPool(1, deadline_s=600.0, preload=())
camera = pool.group(DeviceSet("device", (0,))).place(Remote("camera", Camera))
session = Path(worker._global_node.get_session_dir_path())
assert session.is_dir()
pending = submit(camera.nap, 600.0)
time.sleep(0.5)
[raylet] = worker._global_node.all_processes["raylet"]
os.kill(raylet.process.pid, signal.SIGKILL)
try:
    pending.result()
except WorkerError as error:
    print("pid", raylet.process.pid, error, flush=True)
pool.close()
shut_down()
print("session left:", session.exists(), flush=True)
"""


@pytest.mark.slow
def test_a_raylet_that_died_is_named_and_its_session_folder_is_removed(tmp_path) -> None:
    _, output = drive(RAYLET, tmp_path)
    named = r"pid (\d+) the worker on device 0 .* died while camera.nap ran: Ray's node process \(raylet, process \1\)"
    assert re.search(named, output), output
    assert "session left: False" in output


GPUS = """
import ray
from tests.distributed.roles import Camera
from tests.warm_ray import warm_nodes
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.ray_pool import RayPool

sizes = {"num_gpus": 2, "num_cpus": 1, "object_store_memory": 100 * 2**20}
with warm_nodes():
    ray.init("local", include_dashboard=False, logging_level="ERROR", **sizes)
pool = RayPool(2, preload=())
device_sets = [DeviceSet("device", (0,)), DeviceSet("device", (1,)), DeviceSet("cpu", (0,))]
print("apart", [pool.group(device_set).place(Remote("camera", Camera)).visible() for device_set in device_sets])
pool.clear()
device_sets = [DeviceSet("device", (0, 1)), DeviceSet("device", (0, 1), process=1)]
first, second = (pool.group(device_set).place(Remote("camera", Camera)) for device_set in device_sets)
assert len({*first.pids(), *second.pids()}) == 4
print("beside", first.visible() == second.visible(), sorted(second.visible()))
pool.close()
assert ray.is_initialized()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def said_on_gpus(tmp_path_factory) -> dict[str, str]:
    """What a driver whose Ray counts two GPUs saw of them, by the name of the question."""
    status, output = drive(GPUS, tmp_path_factory.mktemp("gpus"))
    assert status == 0, output
    return dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("apart", "beside")))


@pytest.mark.slow
def test_devices_are_gpus_where_the_cluster_has_them(said_on_gpus) -> None:
    assert said_on_gpus["apart"] in ("[['0'], ['1'], ['']]", "[['1'], ['0'], ['']]")


@pytest.mark.slow
def test_a_second_process_sees_the_gpu_of_the_first(said_on_gpus) -> None:
    assert said_on_gpus["beside"] == "True ['0', '1']"
