"""How the ranks of a process group find each other and connect, and who is missing if they do not.

Every rank announces itself in a store, waits for the others, connects, and runs a first collective. All of this has a
deadline of its own, which is shorter than that of a call. Collectives time out later, by the deadline of calls.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unirl.config.errors import RendezvousError, StallError
from unirl.types.device import CPU
from unirl.types.progress import progress

Address = tuple[str, int]
"""Host and port."""
CONNECT_S = 60.0
MARGIN_S = 10.0
"""The driver waits so much longer than a rank, whose error says more about the cause."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
WAYS = (
    f"Open the ports between the machines, set {GLOO} and {NCCL} to the interface that they share (`ip addr` lists "
    "them), try NCCL_IB_DISABLE=1 where InfiniBand is broken, read what NCCL_DEBUG=INFO prints, or raise "
    "connect_timeout_s if the machines are only slow"
)
_HOSTED: list[dist.TCPStore] = []
"""The stores that this process hosts. A reference keeps a store open."""


def host_store(host: str) -> Address:
    """Open a store in which ranks find each other, on a free port of the address `host` only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    _HOSTED.append(
        dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    )
    return host, port


def join_store(address: Address, name: str, timeout_s: float, connect_s: float) -> dist.Store:
    """The part of a hosted store with the keys of `name`. Waits for keys time out after `timeout_s` seconds.

    Raises:
        RendezvousError: 10003 when the store cannot be reached within `connect_s` seconds.
    """
    try:
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=connect_s))
    except dist.DistError as error:
        raise RendezvousError(
            f"{socket.gethostname()} cannot reach {address[0]} port {address[1]}, where the ranks of {name} meet, "
            f"within {connect_s:g} s: {_first_line(error)}. {WAYS}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(name, store)


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one process group meet, and for how long they wait."""

    address: Address
    name: str
    """The name of the group, for its keys in the store and for messages."""
    members: tuple[str, ...]
    """Each rank as text, in rank order."""
    connect_s: float
    """Seconds that each stage may take until the group is connected."""
    timeout_s: float
    """Seconds that a collective may take afterwards."""

    def new_group(self, rank: int, device: torch.device) -> Any:
        """Create a process group beside the default one: NCCL between GPUs, else gloo.

        Raises:
            RendezvousError: 10003 when ranks are missing or cannot be reached, with all that is known of each.
        """
        with self._joined(rank, device) as store:
            if dist.get_default_backend_for_device(device) != "nccl":
                probe = self._gloo(dist.PrefixStore("probe", store), rank, self.connect_s)
                self._first_collective(probe, CPU)
                return self._gloo(store, rank, self.timeout_s)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout_s)
            group = dist.ProcessGroupNCCL(store, rank, len(self.members), options)
            self._first_collective(group, device)
            return group

    def join_default_group(self, rank: int, device: torch.device) -> dist.ProcessGroup:
        """Join the default process group. Errors as in `new_group`."""
        with self._joined(rank, device) as store:
            probe = self._gloo(dist.PrefixStore("probe", store), rank, self.connect_s)
            self._first_collective(probe, CPU)
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(
                backend=backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
                store=store,
                rank=rank,
                world_size=len(self.members),
                timeout=timedelta(seconds=self.timeout_s),
                device_id=None if device.type == "cpu" else device,
            )
            group = dist.group.WORLD
            assert group is not None
            if device.type != "cpu":
                self._first_collective(group, device)
            return group

    def _gloo(self, store: dist.Store, rank: int, timeout_s: float) -> Any:
        return dist.ProcessGroupGloo(store, rank, len(self.members), timeout=timedelta(seconds=timeout_s))

    def _first_collective(self, group: Any, device: torch.device) -> None:
        """Connect all ranks, which NCCL does when they first communicate."""
        group.allreduce([torch.zeros(1, device=device)]).wait(timedelta(seconds=self.connect_s))
        progress(f"connected {device.type} ranks of {self.name}")

    @contextmanager
    def _joined(self, rank: int, device: torch.device) -> Iterator[dist.Store]:
        """The store, once all ranks have arrived in it. An error of the block names all ranks."""
        variables = [GLOO, *([] if device.type == "cpu" else [NCCL])]
        for variable in variables:
            problem = interface_problem(variable)
            if problem is not None:
                raise RendezvousError(f"{self._text(rank)} cannot join {self.name}: {problem}. {WAYS}")
        store = join_store(self.address, self.name, self.timeout_s, self.connect_s)
        progress(f"reached the store of {self.name}")
        self._arrive(store, rank, variables)
        try:
            yield store
        except RuntimeError as error:  # gloo, NCCL and the store raise this class for any failure to connect
            arrived = "; ".join(f"{self._text(other)}, {at}" for other, at in self._arrived(store).items())
            raise RendezvousError(
                f"all ranks of {self.name} have arrived, and {self._text(rank)} cannot connect to the others within "
                f"{self.connect_s:g} s: {_first_line(error)}. The ranks: {arrived}. {WAYS}"
            ) from error

    def _arrive(self, store: dist.Store, rank: int, variables: list[str]) -> None:
        """Announce this rank, and wait for all."""
        store.set(f"arrived/{rank}", own_interfaces(variables))
        keys = [f"arrived/{other}" for other in range(len(self.members))]
        try:
            store.wait(keys, timedelta(seconds=self.connect_s))
        except dist.DistError as error:
            arrived = self._arrived(store)
            missing = [self._text(other) for other in range(len(self.members)) if other not in arrived]
            there = "; ".join(f"{self._text(other)}, {at}" for other, at in arrived.items())
            raise RendezvousError(
                f"{len(missing)} of {len(self.members)} ranks have not joined {self.name} within {self.connect_s:g} s: "
                f"{'; '.join(missing)}. Joined: {there}. {WAYS}",
                is_consequence=True,
            ) from error
        progress(f"met all ranks of {self.name}")

    def _arrived(self, store: dist.Store) -> dict[int, str]:
        """The ranks that are in the store, and their interfaces."""
        ranks = range(len(self.members))
        try:
            return {r: store.get(f"arrived/{r}").decode() for r in ranks if store.check([f"arrived/{r}"])}
        except dist.DistError:  # its host is gone, which another error says
            return {}

    def _text(self, rank: int) -> str:
        return f"rank {rank} ({self.members[rank]})"


def own_interfaces(variables: list[str]) -> str:
    """The host of this process, and the interfaces that its connections use, as text."""
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        resolved = "no address"
    named = ", ".join(f"{name}={os.environ[name]}" if os.environ.get(name) else f"{name} unset" for name in variables)
    return f"host {host} (its name resolves to {resolved}), {named}"


def interface_problem(variable: str) -> str | None:
    """Why the interfaces that an environment variable names do not exist here. None if one does, or if it is unset.

    gloo takes names. NCCL takes beginnings of names, `=` before exact names, and `^` before names to leave out.
    """
    setting = os.environ.get(variable, "")
    if not setting:
        return None
    own = [name for _, name in socket.if_nameindex()]
    if variable == GLOO:
        usable = all(name in own for name in setting.split(","))
    elif setting.startswith("^"):
        left_out = tuple(setting.lstrip("^=").split(","))
        usable = any(name not in left_out if setting[1:2] == "=" else not name.startswith(left_out) for name in own)
    else:
        chosen = tuple(setting.lstrip("=").split(","))
        usable = any(name in chosen if setting.startswith("=") else name.startswith(chosen) for name in own)
    here = f"{socket.gethostname()}, which has {', '.join(own)}"
    return None if usable else f"{variable}={setting} names no interface of {here}"


@contextmanager
def named_rendezvous() -> Iterator[None]:
    """Turn a stall of a call that connects ranks into a RendezvousError (10003). Its text names the silent ranks."""
    try:
        yield
    except StallError as error:
        raise RendezvousError(f"{error}\n{WAYS}") from error


def leave_process_group() -> None:
    """Leave the default process group if there is one, and close the stores of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _HOSTED.clear()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
