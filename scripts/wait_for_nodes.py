"""Waits until a Ray cluster has enough nodes.

    RAY_ADDRESS=host:port python scripts/wait_for_nodes.py NUM_NODES SECONDS

The exit status is 0 if NUM_NODES nodes have joined within SECONDS, otherwise 8, the status of a stall. If this process
has UNIRL_NODE_RANK (or RLINF_NODE_RANK), every node must have one, and no two the same: otherwise the status is 5.
"""

import os
import socket
import sys
import time


def is_open(address: str) -> bool:
    """True if a server listens at `address`. This is faster than `ray.init`, which also prints errors if none does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def wait_for_port(address: str, deadline: float) -> bool:
    while not is_open(address):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def node_addresses() -> list[str]:
    import ray

    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])


def wait_for_nodes(num_nodes: int, deadline: float) -> list[str]:
    """Waits for the nodes, or until the deadline, and returns their addresses. Prints every change."""
    seen = None
    while True:
        here = node_addresses()
        if here != seen:
            print(f"unirl: {len(here)} of {num_nodes} nodes: {' '.join(here)}", file=sys.stderr, flush=True)
        seen = here
        if len(here) >= num_nodes or time.monotonic() > deadline:
            return here
        time.sleep(0.5)


def rank_problem() -> str | None:
    """The error about the ranks of the nodes, if this process has a rank and they are not unique."""
    from unirl.config.errors import ResourceError, report
    from unirl.distributed.group.node_ranks import VARIABLES, ask_nodes, live_nodes, ranks_of

    if not any(os.environ.get(name) for name in VARIABLES):
        return None
    nodes = live_nodes()
    answers = ask_nodes({node.id: () for node in nodes})
    try:
        ranks = ranks_of({node.address: answers[node.id][0] for node in nodes})
    except ResourceError as error:
        return report(error)
    print(f"unirl: ranks: {', '.join(f'{rank} {address}' for rank, address in ranks.items())}", file=sys.stderr)
    return None


def main(num_nodes: int, seconds: float) -> int:
    import ray

    address, deadline = os.environ["RAY_ADDRESS"], time.monotonic() + seconds
    if not wait_for_port(address, deadline):
        print(f"error[8001]: no Ray cluster answers at {address} after {seconds:g} s", file=sys.stderr)
        return 8
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    here = wait_for_nodes(num_nodes, deadline)
    problem = rank_problem() if len(here) >= num_nodes else None
    ray.shutdown()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 5
    if len(here) >= num_nodes:
        return 0
    print(
        f"error[8001]: {len(here)} of {num_nodes} nodes joined {address} within {seconds:g} s: {' '.join(here)}. "
        "Look at the output of the missing nodes; they need the same address, port and token",
        file=sys.stderr,
    )
    return 8


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
