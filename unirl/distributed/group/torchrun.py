"""A process that torchrun started: its rank, and how the ranks and the driver, which is in rank 0, find each other.

    torchrun --nproc_per_node=2 -m unirl.train_diffusion --config-name=diffusion/sd3_trainside

Every rank hosts a worker. Rank 0 runs the loop as well, in its main thread.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from unirl.config.errors import InvalidValueError, RendezvousError, UnsupportedEnvironmentError
from unirl.config.ranks import TORCHRUN_ID

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WAIT_FOR_DRIVER_S = 24 * 3600.0
"""Seconds for rank 0 to read and check the recipe. torchrun ends the other ranks if it fails."""
STORE_S = 60.0
NO_POOL = "no pool"
WAY = "Start it as: torchrun --nproc_per_node=N -m unirl.train_diffusion --config-name=RECIPE runtime=torchrun"

LOST: list[str] = []
"""The ranks that ended before the driver, each as the text of its worker."""


@dataclass(frozen=True)
class TorchrunRank:
    """The rank of a process and the address of its run, from the variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int
    """The number of this process on its machine, which is that of its GPU."""
    address: str
    """The machine of rank 0."""
    port: int
    attempt: str
    """Tells the attempts of `torchrun --max-restarts` apart."""
    local_world_size: int
    """The ranks on each machine."""
    hosts_store: bool
    """True if this process hosts the store. torchrun's agent usually does."""

    def store(self) -> dist.Store:
        """The store of this run. Raises RendezvousError (10003) when it cannot be reached."""
        try:
            store = dist.TCPStore(
                self.address,
                self.port,
                is_master=self.hosts_store,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_S),
            )
        except dist.DistError as error:
            raise RendezvousError(
                f"rank {self.rank} cannot reach torchrun's store at MASTER_ADDR={self.address} "
                f"MASTER_PORT={self.port}: {str(error).splitlines()[0]}. Open the port between the machines"
            ) from error
        return dist.PrefixStore(f"unirl/{self.attempt}", store)


def torchrun_rank(environment: Mapping[str, str] | None = None) -> TorchrunRank | None:
    """The rank of this process, read from its environment. None if torchrun did not start it.

    Raises:
        UnsupportedEnvironmentError: 3002 when torchrun started it and variables are missing.
        InvalidValueError: 2004 for a variable that is no number, or a rank outside WORLD_SIZE.
    """
    variables = os.environ if environment is None else environment
    if TORCHRUN_ID not in variables:
        return None
    missing = [name for name in VARIABLES if not variables.get(name)]
    if missing:
        raise UnsupportedEnvironmentError(f"torchrun started this process without {', '.join(missing)}. {WAY}")
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not (variables[name].isascii() and variables[name].isdigit()):
            raise InvalidValueError(f"{name}={variables[name]} must be a whole number. {WAY}")
        numbers[name] = int(variables[name])
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise InvalidValueError(f"RANK={numbers['RANK']} must be below WORLD_SIZE={numbers['WORLD_SIZE']}. {WAY}")
    return TorchrunRank(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        address=variables["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        attempt=f"{variables[TORCHRUN_ID]}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        local_world_size=int(variables.get("LOCAL_WORLD_SIZE") or numbers["WORLD_SIZE"]),
        hosts_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and numbers["RANK"] == 0,
    )


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver waits for the workers, and the secret that lets them in."""

    host: str
    port: int
    key: bytes

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.key.hex()}"

    @staticmethod
    def decode(text: str) -> DriverAddress:
        host, port, key = text.split()
        return DriverAddress(host, int(port), bytes.fromhex(key))

    def connect(self) -> Connection:
        return Client((self.host, self.port), authkey=self.key)


class DriverDoor:
    """The driver's end, at which the workers of all ranks knock: two connections each, for calls and for questions."""

    def __init__(self, own: TorchrunRank) -> None:
        self.store = own.store()
        self.world_size = own.world_size
        key = secrets.token_bytes(32)
        host = socket.gethostbyname(own.address)
        try:
            self.listener = Listener((host, 0), backlog=2 * own.world_size, authkey=key)
        except OSError as error:
            raise RendezvousError(
                f"MASTER_ADDR={own.address} ({host}) is no address of this machine, on which rank 0 runs: {error}. Let "
                "torchrun's --rdzv-endpoint or --master-addr name the machine of rank 0"
            ) from error
        self.address = DriverAddress(host, int(str(self.listener.address[1])), key)
        self.connections: dict[tuple[int, str], tuple[Connection, Any]] = {}
        """(rank, purpose) -> the connection, and what the worker says about itself."""
        self.arrived = threading.Condition()
        threading.Thread(target=self._accept, args=(2 * own.world_size,), name="accept-ranks", daemon=True).start()
        self.store.set("driver", self.address.encode())

    def _accept(self, number: int) -> None:
        while len(self.connections) < number:
            try:
                connection = self.listener.accept()
                rank, purpose, about = unpacked(connection.recv_bytes())
            except (OSError, EOFError, ValueError, AuthenticationError):  # a stranger, or the listener was closed
                if self.listener._listener is None:  # type: ignore[attr-defined]
                    return
                continue
            with self.arrived:
                self.connections[rank, purpose] = connection, about
                self.arrived.notify_all()

    def wait_for(self, rank: int, purpose: str, deadline: float) -> tuple[Connection, Any]:
        """A connection of a rank, and what its worker says about itself.

        Raises:
            RendezvousError: 10003 naming the ranks that have not connected by the deadline.
        """
        with self.arrived:
            seconds = max(0.0, deadline - time.monotonic())
            if self.arrived.wait_for(lambda: (rank, purpose) in self.connections, seconds):
                return self.connections[rank, purpose]
            missing = [str(each) for each in range(self.world_size) if (each, purpose) not in self.connections]
        raise RendezvousError(
            f"{len(missing)} of {self.world_size} ranks of torchrun have not reached the driver at {self.address.host} "
            f"port {self.address.port} in time: {', '.join(missing)}. Look at their output"
        )

    def close(self) -> None:
        self.listener.close()


def find_driver(own: TorchrunRank) -> DriverAddress | None:
    """Where the driver waits, once it does. None if rank 0 ends without any work for the other ranks."""
    store = own.store()
    store.wait(["driver"], timedelta(seconds=WAIT_FOR_DRIVER_S))
    text = store.get("driver").decode()
    return None if text == NO_POOL else DriverAddress.decode(text)


def release_ranks(own: TorchrunRank) -> None:
    """Let the other ranks end if rank 0 ends without having opened a pool."""
    own.store().compare_set("driver", "", NO_POOL)


def packed(value: object) -> bytes:
    """A value as bytes. Functions of a test or of a notebook travel by value, as with Ray."""
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value, protocol=5))


def unpacked(message: bytes) -> Any:
    """The value of bytes that `packed` made in another rank of this run. They can run code, so ranks prove a secret."""
    return pickle.loads(message)
