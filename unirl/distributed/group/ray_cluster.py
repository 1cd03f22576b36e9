"""The Ray cluster of a pool: connects to one or starts one, and reserves devices."""

from __future__ import annotations

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from unirl.config.dependencies import WAYS, check_ray_address
from unirl.config.errors import GeometryError, ResourceError, UnsupportedEnvironmentError, WorkerError, report
from unirl.config.node_groups import NodeGroups
from unirl.config.plugins import summary
from unirl.distributed.group.node_places import NodeBundle, bundles_of
from unirl.distributed.group.reaper import kill_on_exit
from unirl.types.device import num_accelerators

OLDEST = (2, 54)
NAMESPACE = "unirl"
CPU_OBJECT_STORE = 200 * 2**20
HEALTH = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""With these settings Ray reports a dead or frozen node after about 4 s; with its defaults, after a minute."""
RESERVE_S = 10.0

_is_shutting_down = threading.Event()
"""Set when this process ends the cluster that it started."""
_reapers: list[subprocess.Popen[bytes]] = []
"""The processes that end Ray's agents when this process ends."""
_own_sessions: list[Path] = []
"""The folders of the clusters that this process started. That of a cluster that it joined belongs to others."""


def connect(num_cpus: int) -> bool:
    """Connect this process to Ray. Returns False if it was connected already; then the caller does not disconnect it.

    RAY_ADDRESS names a cluster. Without it, one starts here with at least `num_cpus` slots. It is reachable from this
    machine only.

    Raises:
        DependencyError: 3002 when Ray is too old, 3003 when nothing answers at RAY_ADDRESS.
        ResourceError: 5001 when the cluster there refuses this process.
    """
    import ray

    check_version(ray.__version__)
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    with _own_signals():
        if address and address != "local":
            _join(address)
        else:
            start(num_cpus)
    return True


def check_version(version: str) -> None:
    """Raises DependencyError (3002) when Ray is older than the oldest tested version."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedEnvironmentError(
            f"runtime: ray needs ray >= {oldest}, and {version} is installed: "
            f"pip install -c constraints.txt 'ray>={oldest}'"
        )


def check_interpreter(path: str) -> None:
    """Raises DependencyError (3002) for an interpreter with which Ray cannot start workers."""
    if any(letter.isspace() for letter in path):
        raise UnsupportedEnvironmentError(
            f"runtime: Ray cannot start workers with {path}, because the path contains a space. Move the project with "
            "its .venv to a path without spaces, or set runtime=local"
        )


def start(num_cpus: int, is_second_try: bool = False) -> None:
    """Start a Ray cluster on this machine, bound to loopback, which ends with this process."""
    from ray._private import worker

    check_interpreter(sys.executable)
    _is_shutting_down.clear()
    # Ray reports usage to its vendor by default; this variable is the only switch.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts workers with a niceness of 15, which starves them wherever other processes use the cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        _init(num_cpus)
    except Exception as error:  # Ray raises plain exceptions if one of its processes does not come up
        shut_down()
        # Ray gives its processes 30 s, which cannot be changed and may be too short while the machine is busy.
        if not is_second_try and "timed out during startup" in str(error):
            return start(num_cpus, is_second_try=True)
        raise ResourceError(
            f"runtime=ray: Ray did not start on this machine: {summary(error)}. Look into the logs below "
            "/tmp/ray/session_latest/logs, stop what keeps the machine busy, or use runtime=local"
        ) from error
    node = worker._global_node
    _own_sessions.append(Path(node.get_session_dir_path()))
    started = {info.process.pid for infos in node.all_processes.values() for info in infos}
    # For runs that close no pool. It runs before Ray's own exit handler, which sends SIGTERM.
    atexit.register(shut_down)
    _reapers.append(kill_on_exit(descendants(started)))
    (gcs,) = node.all_processes["gcs_server"]
    threading.Thread(target=end_without, args=(gcs.process.pid,), name="watch-gcs", daemon=True).start()


def _init(num_cpus: int) -> None:
    import ray

    num_gpus = num_accelerators()
    with _on_loopback():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(num_cpus, cores()),
            num_gpus=num_gpus,
            object_store_memory=None if num_gpus else CPU_OBJECT_STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _system_config={**HEALTH, "enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )


def lost_raylet() -> str:
    """How the workers died, if the node process of the cluster that `start` started has ended. Empty otherwise.

    Ray itself says only that the owner of the workers has died.
    """
    from ray._private import worker

    node = worker._global_node
    raylets = node.all_processes.get("raylet", ()) if node is not None else ()
    dead = [info.process for info in raylets if info.process.poll() is not None]
    return "".join(
        f"Ray's node process (raylet, process {process.pid}) has ended with status {process.returncode}, and the "
        "workers of this machine with it. Look whether the machine ran out of memory (dmesg)"
        for process in dead
    )


def end_without(gcs: int) -> None:
    """Wait for the end of Ray's control process. If it was not we who ended it, end this process with status 10.

    Ray would try to reach it for a minute and then abort this process.

    Args:
        gcs: its process id.
    """
    handle = os.pidfd_open(gcs)
    try:
        select.select([handle], [], [])
    finally:
        os.close(handle)
    if _is_shutting_down.is_set():
        return
    error = WorkerError(
        f"Ray's control process (gcs_server, process {gcs}) has ended, so no worker can be reached. Look whether the "
        "machine ran out of memory (dmesg), then continue with resume=auto"
    )
    print(report(error), file=sys.stderr, flush=True)
    os._exit(WorkerError.exit_status)


def stop_listening() -> None:
    """Print no errors of the cluster from here on, such as those of workers that this process is about to kill."""
    from ray._private import worker

    if worker.global_worker.connected:
        worker.global_worker.threads_stopped.set()  # as ray.shutdown does, which ends the thread that prints
        worker.global_worker.gcs_error_subscriber.close()


def shut_down() -> None:
    """End the cluster that `start` started, by SIGKILL: its processes block SIGTERM, which Ray would send."""
    import ray
    from ray._private import worker

    atexit.unregister(shut_down)
    _is_shutting_down.set()
    node = worker._global_node
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
    ray.shutdown()
    while _reapers:
        _reapers.pop().communicate()
    while _own_sessions:
        shutil.rmtree(_own_sessions.pop(), ignore_errors=True)  # logs and sockets that nobody reads any more


def descendants(roots: Collection[int]) -> list[int]:
    """The descendants of the processes `roots`, without these. Empty where the system has no /proc."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended meanwhile
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
            below.setdefault(int(parent), []).append(int(entry.parent.name))
    below_roots: list[int] = []
    waiting = list(roots)
    while waiting:
        children = below.get(waiting.pop(), [])
        below_roots += children
        waiting += children
    return below_roots


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray keep a loopback address, which it otherwise replaces by an address that other machines reach."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _join(address: str) -> None:
    import ray

    check_ray_address(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:  # Ray's errors for a missing or incompatible cluster
        first = (str(error).splitlines() or [""])[0]
        raise ResourceError(f"Ray at RAY_ADDRESS={address} refuses this process: {first}. {WAYS}") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore our handler of SIGTERM, which Ray replaces. Processes that start inside the block ignore the signals of a
    scheduler that stops a run and of a closed terminal. All processes get these signals, and the driver needs the
    others to finish its step."""
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
    try:
        yield
    finally:
        if before not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclass(frozen=True)
class Reservation:
    """Devices reserved for a pool: one bundle per machine."""

    placement_group: Any
    bundles: tuple[NodeBundle, ...]
    threads: int
    """Threads of each worker."""

    def bundle_of(self, kind: str, index: int) -> int:
        """The bundle of a device, or of a CPU process of the host. These take turns over the machines."""
        if kind != "device":
            return index % len(self.bundles)
        bounds = accumulate(bundle.count for bundle in self.bundles)
        return next(position for position, bound in enumerate(bounds) if index < bound)


def reserve(
    num_devices: int, devices_per_node: int | None, threads: int | None = None, node_groups: NodeGroups | None = None
) -> Reservation:
    """Reserve the devices: `devices_per_node` on each machine, or those of each group of nodes.

    Args:
        threads: threads of each worker. None: its share of the cores of its machine, at most those of this process.

    Raises:
        ConfigError: 2010 when `devices_per_node` does not divide `num_devices`.
        ResourceError: 5001 when the cluster has too few devices, or other jobs hold them, or a group has no live node.
        UnsupportedEnvironmentError: 3002 for an interpreter of a group that cannot run workers.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    bundles = bundles_of(node_groups) if node_groups else _equal_bundles(nodes, num_devices, devices_per_node)
    strategy = "PACK" if node_groups else "STRICT_SPREAD"
    group = placement_group([bundle.resources for bundle in bundles], strategy=strategy)
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        resources = sorted({bundle.resource for bundle in bundles})
        raise ResourceError(
            f"the run needs {num_devices} {' and '.join(resources)} slots of the Ray cluster, and other jobs hold too "
            f"many of {'; '.join(_listed(nodes, resource) for resource in resources)}. Wait for them, or lower "
            "num_devices"
        )
    node_cores = cores() if len(nodes) == 1 else int(min(node.get("CPU", 1) for _, node in nodes))
    share = max(1, min(torch.get_num_threads(), node_cores // max(bundle.count for bundle in bundles)))
    return Reservation(group, tuple(bundles), share if threads is None else threads)


Nodes = Sequence[tuple[str, Mapping[str, float]]]
"""The address of each machine, and what Ray has there."""


def _equal_bundles(nodes: Nodes, num_devices: int, devices_per_node: int | None) -> list[NodeBundle]:
    per_node = devices_per_node or num_devices
    if num_devices % per_node:
        raise GeometryError(
            f"num_devices={num_devices} must be a multiple of devices_per_node={per_node}: every machine has as many"
        )
    resource = "GPU" if any(node.get("GPU", 0) for _, node in nodes) else "CPU"
    _check_enough(nodes, resource, num_devices // per_node, per_node)
    return [NodeBundle(resource, per_node)] * (num_devices // per_node)


def _check_enough(nodes: Nodes, resource: str, num_nodes: int, per_node: int) -> None:
    fitting = sum(node.get(resource, 0) >= per_node for _, node in nodes)
    if fitting < num_nodes:
        raise ResourceError(
            f"the run needs {num_nodes} machine(s) with {per_node} {resource} slots each, and the Ray cluster has "
            f"{_listed(nodes, resource)}. Lower num_devices, set devices_per_node, or add machines "
            "(ray start --address HEAD). Ray counts the GPUs that CUDA_VISIBLE_DEVICES shows where it is started"
        )


def _listed(nodes: Nodes, resource: str) -> str:
    return ", ".join(f"{address} with {node.get(resource, 0):g} {resource} slots" for address, node in nodes)
