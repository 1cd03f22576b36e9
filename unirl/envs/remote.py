"""Environments that a server on another machine plays: `unirl.envs.serve` is the other end."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from unirl.config.errors import AddressError, EpisodeError, InvalidValueError, UnsupportedEnvironmentError
from unirl.envs.messages import (
    MOST_BYTES,
    PROTOCOL,
    Banner,
    Hello,
    RenderRequest,
    ServerReply,
    ServerRequest,
    StartsRequest,
    StepRequest,
    Welcome,
)
from unirl.envs.wire import prove, read_token, tensor_of
from unirl.types.environments import (
    NOT_REPORTED,
    ContinuousActions,
    DiscreteActions,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    Observations,
)

CONNECT_S = 10.0
OPEN_S = 300.0
"""Seconds that a server may take to import its libraries and to make its first environment."""
PAUSE_S = 0.5
"""Seconds between two attempts to reach a server that was lost."""
ENCODER = msgspec.msgpack.Encoder()
REPLIES = msgspec.msgpack.Decoder(ServerReply)


class ConnectionLostError(Exception):
    """The server ended, or is late and was given up. The message says which."""


class RemoteEnvironment:
    """The slots of an environment server, which has the environments and their libraries.

    An episode is the same as in the environment itself, bit for bit. A server that ends, or that takes longer than
    `timeout_s`, is a fault of all slots that play an episode; the next reset connects again, to a server with the same
    spaces.
    """

    def __init__(
        self,
        *,
        address: str,
        token_file: str | None = None,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
    ) -> None:
        """
        Args:
            address: `host:port` of a server that `python -m unirl.envs.serve` started.
            token_file: a file with the token of the server. null: it has none.
            timeout_s: seconds that a reset or a step of all slots may take, and that a lost server may take to return.

        Raises:
            InvalidValueError: 2004, the address is not host:port.
            ExposedServerError: 2040, others may read the token.
            AddressError: 3003, nothing answers there, or the server wants a token.
            UnsupportedEnvironmentError: 3002, another version of the messages, another token, or an environment that
                cannot be made there.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidValueError(
                f"pipeline.env.address={address} is no address of a server. Write host:port, such as 127.0.0.1:7000"
            )
        self._host, self._port, self._address = host.strip("[]"), int(port), address
        self._token, self._timeout_s = read_token(token_file), timeout_s
        self._running: set[int] = set()
        self._lost: dict[int, str] = {}
        """Slots whose episode ended with the connection, and why. Their next step reports it."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._connection: Connection | None
        self._connection, found = self._connected()
        self.spaces, self.is_keyed = spaces_of(found), found.is_keyed

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot. `unirl.types.environments.Environment.reset` has the contract."""
        request = StartsRequest(
            list(slots),
            [start.seed for start in starts],
            [start.task for start in starts],
            [dict(start.options) for start in starts],
        )
        try:
            reply = self._ask(request)
        except ConnectionLostError:
            try:
                reply = self._ask(request)  # of a server that was started again
            except ConnectionLostError as error:
                raise EpisodeError(f"environment server {self._address} cannot start an episode: {error}") from error
        self._running.update(slots)
        for slot in slots:
            self._lost.pop(slot, None)
        observations = {key: tensor_of(values) for key, values in reply.observations.items()}
        self._dtypes = {key: values.dtype for key, values in observations.items()}
        return observations

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take one action in each slot. `unirl.types.environments.Environment.step` has the contract."""
        idle = set(slots) - self._running - self._lost.keys()
        assert not idle, f"slots {sorted(idle)} have no episode: it ended, or never began. Reset them first"
        is_discrete = isinstance(self.spaces.actions, DiscreteActions)
        actions = actions.long() if is_discrete else actions.float()
        rows = [row for row, slot in enumerate(slots) if slot not in self._lost]
        observations = {
            key: torch.zeros(len(slots), *shape, dtype=self._dtypes[key])
            for key, shape in self.spaces.observations.items()
        }
        rewards, ends = torch.zeros(len(slots)), torch.zeros(2, len(slots), dtype=torch.bool)
        success = torch.full((len(slots),), NOT_REPORTED, dtype=torch.int8)
        faults: dict[int, str] = {}
        if rows:
            data = actions[rows].contiguous().numpy().tobytes()
            with suppress(ConnectionLostError):  # `_lost` has the slots
                reply = self._ask(StepRequest([slots[row] for row in rows], data))
                for key, values in reply.observations.items():
                    observations[key][rows] = tensor_of(values)
                rewards[rows] = torch.frombuffer(bytearray(reply.rewards), dtype=torch.float32)
                ends[:, rows] = torch.frombuffer(bytearray(reply.ends), dtype=torch.bool).reshape(2, -1)
                success[rows] = torch.frombuffer(bytearray(reply.success), dtype=torch.int8)
                faults = {rows[place]: reason for place, reason in reply.faults.items()}
        for row, slot in enumerate(slots):
            if slot in self._lost:
                faults[row] = self._lost.pop(slot)
                ends[1, row] = True
        terminated, truncated = ends
        ended = torch.nonzero(terminated | truncated)[:, 0].tolist()
        self._running.difference_update([slots[row] for row in ended])
        return EnvironmentStep(
            observations=observations,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            success=success,
            faults=faults,
        )

    def render(self, slots: Sequence[int]) -> Tensor | None:
        """[B, 3, H, W] uint8 images of the slots. None if the server draws none, or is lost."""
        with suppress(ConnectionLostError):
            images = None if self._lost else self._ask(RenderRequest(list(slots))).images
            return None if images is None else tensor_of(images)
        return None

    def close(self) -> None:
        """End the connection, and with it the environments of the server. The next reset connects again."""
        self._running.clear()
        self._lost.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: ServerRequest) -> ServerReply:
        """The reply of the server.

        Raises:
            ConnectionLostError: there is none; `_lost` has the episodes that ended.
            EpisodeError: the environment raised an exception.
        """
        if self._connection is None:
            self._connection = self._reconnected()
        try:
            self._connection.send_bytes(ENCODER.encode(request))
            reply = REPLIES.decode(_received(self._connection, self._timeout_s))
        except (EOFError, OSError, ConnectionLostError) as error:
            reason = f"environment server {self._address}: {str(error) or 'the connection ended'}"
            self._connection.close()
            self._connection = None
            self._lost.update(dict.fromkeys(self._running, reason))
            self._running.clear()
            raise ConnectionLostError(reason) from error
        if reply.error:
            raise EpisodeError(f"environment server {self._address}: {reply.error}")
        return reply

    def _reconnected(self) -> Connection:
        """A connection to a server that may be starting again."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection, found = self._connected()
                break
            except AddressError as error:
                if time.monotonic() > deadline:
                    raise ConnectionLostError(str(error)) from error
            time.sleep(PAUSE_S)
        if spaces_of(found) != self.spaces:
            connection.close()
            raise EpisodeError(
                f"environment server {self._address} came back with other spaces: {spaces_of(found)}, before "
                f"{self.spaces}. Serve the same environment, or start a new run"
            )
        return connection

    def _connected(self) -> tuple[Connection, Welcome]:
        where = f"pipeline.env.address={self._address}"
        try:
            sock = socket.create_connection((self._host, self._port), CONNECT_S)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            raise AddressError(
                f"{where}: nothing answers there ({error}). Start it: "
                f"python -m unirl.envs.serve RECIPE --port {self._port}"
            ) from error
        connection = Connection(sock.detach())
        try:
            banner = msgspec.msgpack.decode(_received(connection, CONNECT_S), type=Banner)
            self._check_banner(banner, where)
            proof = prove(self._token, banner.nonce)
            connection.send_bytes(ENCODER.encode(Hello(proof, self._timeout_s)))
            found = msgspec.msgpack.decode(_received(connection, OPEN_S), type=Welcome)
        except (EOFError, OSError, ConnectionLostError, msgspec.MsgspecError) as error:
            connection.close()
            raise AddressError(
                f"{where}: what answers there is no environment server ({str(error) or 'it ended the connection'})"
            ) from error
        except (AddressError, UnsupportedEnvironmentError):
            connection.close()
            raise
        if found.reason:
            connection.close()
            raise UnsupportedEnvironmentError(f"{where}: {found.reason}")
        return connection, found

    def _check_banner(self, banner: Banner, where: str) -> None:
        if banner.protocol != PROTOCOL:
            raise UnsupportedEnvironmentError(
                f"{where}: the server speaks version {banner.protocol} of the protocol, this run version {PROTOCOL}. "
                "Install the same unirl on both machines"
            )
        if banner.needs_token and not self._token:
            raise AddressError(
                f"{where}: the server wants a token. Copy its token file to this machine, and name it in "
                "pipeline.env.token_file"
            )


def _received(connection: Connection, limit_s: float) -> bytes:
    """The next message. Raises ConnectionLostError if none comes in time."""
    if not connection.poll(limit_s):
        raise ConnectionLostError(f"it did not answer within {limit_s:g} s")
    return connection.recv_bytes(MOST_BYTES)


def spaces_of(found: Welcome) -> EnvironmentSpaces:
    """The spaces that a server says it has."""
    if found.discrete is not None:
        actions: DiscreteActions | ContinuousActions = DiscreteActions(found.discrete)
    else:
        actions = ContinuousActions(found.continuous or 0)
    return EnvironmentSpaces(
        observations=found.observations, actions=actions, most_steps=found.most_steps, chunk=found.chunk
    )
