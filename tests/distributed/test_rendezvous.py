"""Ranks that cannot meet or connect are named with their hosts and interfaces, by a deadline of their own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.roles import Camera
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import RendezvousError, StallError
from unirl.distributed.group.failures import WorkerFailure, first_cause
from unirl.distributed.group.handle import PendingCall, Remote
from unirl.distributed.group.rendezvous import GLOO, NCCL, Rendezvous, host_store, interface_problem, join_store
from unirl.distributed.weight_sync.listening_routes import BroadcastRoute
from unirl.distributed.weight_sync.sync import EngineSync
from unirl.types.device import CPU
from unirl.types.progress import Heartbeat, reporting_to

LONG = 300.0
MEMBERS = ("the worker on device 0", "the worker on device 1", "the worker on device 2")


@pytest.fixture(autouse=True)
def no_interfaces(monkeypatch):
    monkeypatch.delenv(GLOO, raising=False)
    monkeypatch.delenv(NCCL, raising=False)


def meeting(connect_s: float = LONG, timeout_s: float = LONG) -> Rendezvous:
    return Rendezvous(host_store("127.0.0.1"), "devices 0-2", MEMBERS, connect_s, timeout_s)


def outcomes(ranks: range, join: Callable[[int], Any]) -> list[Any]:
    """What `join` returns or raises on each rank, in threads."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        pending = [threads.submit(join, rank) for rank in ranks]
        return [each.exception() or each.result() for each in pending]


def test_all_ranks_connect_and_collectives_keep_the_deadline_of_calls() -> None:
    met = meeting(timeout_s=777.0)

    def join(rank: int) -> tuple[float, timedelta]:
        group = met.new_group(rank, CPU)
        total = torch.tensor([float(rank)])
        group.allreduce([total]).wait()
        return float(total), group.options._timeout

    assert outcomes(range(3), join) == [(3.0, timedelta(seconds=777))] * 3


def test_a_rank_that_never_joins_is_named_beside_those_that_did() -> None:
    met = meeting(connect_s=1.0)
    for error in outcomes(range(2), lambda rank: met.new_group(rank, CPU)):
        assert isinstance(error, RendezvousError) and error.is_consequence and error.code == 10003
        message = str(error)
        assert (
            "1 of 3 ranks have not joined devices 0-2 within 1 s: rank 2 (the worker on device 2). Joined: " in message
        )
        here = f"host {socket.gethostname()} (its name resolves to "
        assert (
            f"rank 0 (the worker on device 0), {here}" in message
            and f"rank 1 (the worker on device 1), {here}" in message
        )
        assert f"{GLOO} unset" in message and "connect_timeout_s" in message


def test_a_port_that_nothing_listens_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        RendezvousError, match=rf"cannot reach 127.0.0.1 port {port}, where the ranks of x meet, within 1 s"
    ):
        join_store(("127.0.0.1", port), "x", LONG, 1.0)


def test_an_interface_that_does_not_exist_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setenv(GLOO, "nope0")
    with pytest.raises(
        RendezvousError, match=r"rank 1 \(.*\) cannot join devices 0-2: GLOO_SOCKET_IFNAME=nope0 names no"
    ):
        meeting().new_group(1, CPU)


@pytest.mark.parametrize(
    ("variable", "setting", "usable"),
    [
        (GLOO, "eth0", True),
        (GLOO, "eth", False),
        (GLOO, "eth0,nope0", False),
        (NCCL, "eth", True),
        (NCCL, "=eth", False),
        (NCCL, "=eth0", True),
        (NCCL, "ens,eth", True),
        (NCCL, "^lo,eth", True),
        (NCCL, "^lo,eth,ib", False),
        (NCCL, "^=lo,eth", True),
        (NCCL, "", True),
    ],
)
def test_interfaces_are_named_as_gloo_and_nccl_read_them(monkeypatch, variable, setting, usable) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    monkeypatch.setenv(variable, setting)
    problem = interface_problem(variable)
    assert (problem is None) == usable
    assert usable or "which has lo, eth0, ib0" in str(problem)


def test_a_rank_that_arrives_and_cannot_connect_names_all_ranks(monkeypatch) -> None:
    met, gloo = meeting(connect_s=2.0), Rendezvous._gloo

    def broken(self: Rendezvous, store: dist.Store, rank: int, timeout_s: float) -> Any:
        if rank == 1:
            raise RuntimeError("connect [10.0.0.1]:4242: Connection refused\nException raised from ...")
        return gloo(self, store, rank, timeout_s)

    monkeypatch.setattr(Rendezvous, "_gloo", broken)
    errors = outcomes(range(3), lambda rank: met.new_group(rank, CPU))
    message = str(errors[1])
    assert "rank 1 (the worker on device 1) cannot connect to the others within 2 s: connect [10.0.0.1]:4242" in message
    assert all(f"rank {rank} (the worker on device {rank}), host " in message for rank in range(3))
    assert all(isinstance(error, RendezvousError) for error in errors)


def test_each_stage_is_progress_so_that_the_driver_knows_how_far_a_rank_came() -> None:
    beat = Heartbeat()
    with reporting_to(beat), pytest.raises(RendezvousError):
        meeting(connect_s=0.5).new_group(0, CPU)
    assert beat.what == "reached the store of devices 0-2"


def test_the_rank_that_failed_is_the_cause_and_not_those_that_waited_for_it() -> None:
    waited = WorkerFailure.of(RendezvousError("rank 1 has not joined", is_consequence=True), "joining", "rank 0")
    failed = WorkerFailure.of(RendezvousError("cannot reach the store"), "joining", "rank 1")
    assert first_cause([waited, failed]) is failed
    assert first_cause([waited]) is waited


def test_a_trainer_whose_engine_does_not_come_names_the_engine_rank() -> None:
    route = BroadcastRoute(host_store("127.0.0.1"), (), 1, deadline_s=LONG, connect_s=1.0)
    with pytest.raises(RendezvousError, match=r"have not joined weight sync within 1 s: rank 1 \(engine rank 0\)"):
        route.open_sender(None)


def test_of_two_ends_the_one_that_failed_is_raised_and_a_silent_one_is_no_stall() -> None:
    def ended(error: Exception) -> PendingCall[None]:
        def wait(deadline_s: float) -> None:
            raise error

        return PendingCall(wait, LONG)

    sync = SimpleNamespace(connect_s=1.0)
    waited, failed = RendezvousError("engine rank 0 has not joined", is_consequence=True), RendezvousError("no route")
    with pytest.raises(RendezvousError, match="no route"):
        EngineSync._await_connections(sync, [ended(waited), ended(failed)])
    with pytest.raises(RendezvousError, match=r"made no progress(.|\n)*connect_timeout_s"):
        EngineSync._await_connections(sync, [ended(StallError("rollout.connect made no progress for 11 s"))])


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_it_joins_is_named_by_the_driver(ray_pool, monkeypatch) -> None:
    ask, stopped = ray_pool.ask, []

    def ask_then_stop(workers, what, method, *args):
        answers = ask(workers, what, method, *args)
        if method == "host_store":
            stopped.append(next(w for w in ray_pool.worker_refs.values() if w.location.index == 1))
            os.kill(stopped[0].process_info.pid, signal.SIGSTOP)
        return answers

    monkeypatch.setattr(ray_pool, "ask", ask_then_stop)
    monkeypatch.setattr(ray_pool, "connect_s", 2.0)
    try:
        with pytest.raises(
            RendezvousError, match=r"1 of 2 ranks have not joined .*: rank 1 \(the worker on device 1 \(host"
        ):
            ray_pool.group(DeviceSet("device", (0, 1))).place(Remote("camera", Camera))
    finally:
        ray_pool.kill([worker for worker in stopped if worker in ray_pool.worker_refs.values()])
