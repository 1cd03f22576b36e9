"""Runs a command on a cluster of two Ray nodes on this machine, each with its own address and CPUs.

    python scripts/two_nodes.py -- python -m unirl.train_diffusion --config-name=diffusion/sd3_trainside \\
        scale=toy runtime=ray num_devices=2 devices_per_node=1
    python scripts/two_nodes.py --kill-second-after 20 -- ...      # kills the second node while the command runs,
    python scripts/two_nodes.py --kill-second-when FILE -- ...     # or as soon as a file exists

The nodes have the addresses 127.0.0.2 (rank 0) and 127.0.0.3 (rank 1), which only this machine reaches. A random token
keeps other users of the machine out. The command finds the cluster by RAY_ADDRESS. The exit status is that of the
command, and both nodes are stopped at the end.
"""

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from wait_for_nodes import wait_for_port

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
RANK = "UNIRL_NODE_RANK"
"""What a node sets before `ray start`, for groups of nodes: the head has rank 0."""
OBJECT_STORE_BYTES = 256 * 1024**2
PATIENCE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray declares a node dead that has not answered for about 12 s, as in the launcher for several nodes."""
JOIN_S = 60
POLL_S = 0.2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Node:
    """A process `ray start --block` with its own process group."""

    def __init__(self, words: list[str], num_cpus: int, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        ray = Path(sys.executable).with_name("ray")
        sizes = [f"--num-cpus={num_cpus}", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(ray), "start", "--block", "--disable-usage-stats", *words, *sizes],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def refusal(self) -> str:
        """The message for a node that did not start, with the end of its log."""
        return f"two_nodes: a node did not start:\n{self.log.read_text()[-2000:]}"

    def kill(self) -> None:
        """Kills the whole process group at once, like a loss of power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Sends SIGTERM, waits for up to 10 s, and then kills what is left."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10.0)
        self.kill()


@contextmanager
def two_nodes(num_cpus: int) -> Iterator[tuple[dict[str, str], Node]]:
    """Starts both nodes for a block. Yields the environment of commands, and the second node."""
    # Unix sockets are created in this folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))
    address = f"{HEAD}:{free_port()}"
    environment = {
        **os.environ,
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    environment |= PATIENCE
    # `ray start --head` fails if RAY_ADDRESS is set.
    starting = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    port = address.rpartition(":")[2]
    head = ["--head", f"--port={port}", f"--node-ip-address={HEAD}", "--include-dashboard=false"]
    nodes = []
    try:
        nodes.append(Node([*head, f"--temp-dir={folder}"], num_cpus, starting | {RANK: "0"}, folder / "head.log"))
        if not wait_for_port(address, time.monotonic() + JOIN_S):
            raise SystemExit(nodes[-1].refusal())
        joining = [f"--address={address}", f"--node-ip-address={SECOND}"]
        nodes.append(Node(joining, num_cpus, starting | {RANK: "1"}, folder / "second.log"))
        wait_for_nodes(2, environment, nodes)
        print(f"two_nodes: RAY_ADDRESS={address}, {num_cpus} CPUs on each of two nodes", file=sys.stderr, flush=True)
        yield environment, nodes[1]
    finally:
        for node in reversed(nodes):
            node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes(number: int, environment: Mapping[str, str], nodes: list[Node]) -> None:
    script = Path(__file__).with_name("wait_for_nodes.py")
    command = [sys.executable, str(script), str(number), str(JOIN_S)]
    if subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode:
        raise SystemExit(nodes[-1].refusal())


def run(command: list[str], environment: Mapping[str, str], second: Node, is_due: Callable[[float], bool]) -> int:
    """Runs the command and returns its exit status. Kills the second node once `is_due(seconds so far)` is true."""
    running = subprocess.Popen(command, env=environment)
    forward_signals(running)
    start = time.monotonic()
    is_alive = True
    while running.poll() is None:
        seconds = time.monotonic() - start
        if is_alive and is_due(seconds):
            print(f"two_nodes: killing the node {SECOND} after {seconds:.1f} s", file=sys.stderr, flush=True)
            second.kill()
            is_alive = False
        time.sleep(POLL_S)
    return running.returncode if running.returncode >= 0 else 128 - running.returncode


def forward_signals(running: subprocess.Popen) -> None:
    """Forwards SIGTERM to the command from now on. Ctrl-C is ignored here, because the command gets it directly."""
    signal.signal(signal.SIGTERM, lambda number, frame: running.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray counts on each node (default 2)")
    parser.add_argument("--kill-second-after", type=float, metavar="S", help="kill the second node after S seconds")
    parser.add_argument("--kill-second-when", type=Path, metavar="FILE", help="kill it as soon as FILE exists")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, leave)
    after, file = arguments.kill_second_after, arguments.kill_second_when
    with two_nodes(arguments.cpus) as (environment, second):
        return run(
            arguments.command,
            environment,
            second,
            lambda seconds: (after is not None and seconds > after) or (file is not None and file.exists()),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
