"""Serves the environment of a recipe to runs on other machines: `python -m unirl.envs.serve RECIPE [key=value ...]`.

    python -m unirl.envs.serve embodied/cartpole_ppo --port 7000
    unirl train embodied/cartpole_ppo \\
        'pipeline.env={_target_: unirl.envs.remote.RemoteEnvironment, address: 127.0.0.1:7000}'

Each connection has a process and environments of its own, which end with it. What a connection sends are seeds, tasks,
options and actions, as msgpack; nothing is unpickled. It is not encrypted: between machines that do not trust their
network, use a tunnel, such as `ssh -L`. The server needs an operating system with fork.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
import secrets
import signal
import socket
import socketserver
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import msgspec
import torch
from torch import Tensor

from unirl.config.build import build
from unirl.config.errors import AddressError, ExposedServerError, UniRLError, UsageError, report
from unirl.config.load import load
from unirl.config.node import Node
from unirl.envs.messages import (
    MOST_BYTES,
    PROTOCOL,
    ArrayBytes,
    Banner,
    Hello,
    RenderRequest,
    ServerReply,
    ServerRequest,
    StartsRequest,
    StepRequest,
    Welcome,
)
from unirl.envs.slots import reason_of
from unirl.envs.wire import array_bytes, prove, read_token
from unirl.types.environments import DiscreteActions, Environment, EnvironmentSpaces, EpisodeStart

HELLO_S = 10
"""Seconds that a connection may take to say who it is."""
HELLO_BYTES = 4096
OTHER_TOKEN = "the server has another token. Copy its token file to the machine of the run"
GRACE_S = 5.0
"""Seconds after which an environment is given up here, beyond those that the run waits."""
ENCODER = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[ServerRequest] = msgspec.msgpack.Decoder(ServerRequest)


class EnvironmentServer(socketserver.ForkingTCPServer):
    """Answers each connection in a process of its own."""

    allow_reuse_address = True
    max_children = 1024
    block_on_close = False

    def __init__(self, address: tuple[str, int], env: Node, token: bytes) -> None:
        self.env, self.token = env, token
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: object, client_address: object) -> None:
        """Runs in the process of the connection."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sock = cast(socket.socket, request)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanished says nothing
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with Connection(os.dup(sock.fileno())) as connection, suppress(EOFError, OSError, msgspec.MsgspecError):
            serve(connection, self.env, self.token)

    def stop(self) -> None:
        """End the processes of all connections."""
        for child in self.active_children or ():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        self.server_close()


def serve(connection: Connection, env: Node, token: bytes) -> None:
    """Answer the requests of a connection until it ends.

    An environment that takes longer than the run waits has its process killed by an alarm, also inside of C code.
    """
    signal.alarm(HELLO_S)
    nonce = secrets.token_bytes(32)
    connection.send_bytes(ENCODER.encode(Banner(PROTOCOL, nonce, bool(token))))
    hello = msgspec.msgpack.decode(connection.recv_bytes(HELLO_BYTES), type=Hello)
    signal.alarm(0)
    if token and not hmac.compare_digest(hello.proof, prove(token, nonce)):
        connection.send_bytes(ENCODER.encode(Welcome(OTHER_TOKEN)))
        return
    try:
        environment: Environment = build(env)
    except Exception as error:  # an environment is foreign code, which may raise anything
        connection.send_bytes(ENCODER.encode(Welcome(f"the environment cannot be made there: {reason_of(error)}")))
        return
    connection.send_bytes(ENCODER.encode(welcome(environment.spaces, environment.is_keyed)))
    try:
        while True:
            request = REQUESTS.decode(connection.recv_bytes(MOST_BYTES))
            signal.setitimer(signal.ITIMER_REAL, hello.timeout_s + GRACE_S)
            reply = answer(environment, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(ENCODER.encode(reply))
    finally:
        environment.close()


def welcome(spaces: EnvironmentSpaces, is_keyed: bool) -> Welcome:
    """The spaces as they travel."""
    actions = spaces.actions
    return Welcome(
        observations={key: tuple(shape) for key, shape in spaces.observations.items()},
        discrete=actions.count if isinstance(actions, DiscreteActions) else None,
        continuous=None if isinstance(actions, DiscreteActions) else actions.size,
        most_steps=spaces.most_steps,
        chunk=spaces.chunk,
        is_keyed=is_keyed,
    )


def answer(environment: Environment, request: ServerRequest) -> ServerReply:
    """The reply to a request. Whatever the environment raises becomes its `error`."""
    try:
        if isinstance(request, StartsRequest):
            rows = zip(request.seeds, request.tasks, request.options, strict=True)
            starts = [EpisodeStart(seed=seed, task=task, options=options) for seed, task, options in rows]
            return ServerReply(observations=_bytes_of(environment.reset(request.slots, starts)))
        if isinstance(request, RenderRequest):
            images = environment.render(request.slots)
            return ServerReply(images=None if images is None else array_bytes(images))
        assert isinstance(request, StepRequest)
        return _step(environment, request)
    except Exception as error:  # an environment is foreign code, which may raise anything
        return ServerReply(error=reason_of(error))


def _step(environment: Environment, request: StepRequest) -> ServerReply:
    is_discrete = isinstance(environment.spaces.actions, DiscreteActions)
    actions = torch.frombuffer(bytearray(request.actions), dtype=torch.int64 if is_discrete else torch.float32)
    step = environment.step(request.slots, actions.reshape(len(request.slots), *environment.spaces.step_shape))
    return ServerReply(
        observations=_bytes_of(step.observations),
        rewards=step.rewards.numpy().tobytes(),
        ends=torch.stack([step.terminated, step.truncated]).numpy().tobytes(),
        success=step.success.to(torch.int8).numpy().tobytes(),
        faults=dict(step.faults),
    )


def _bytes_of(observations: dict[str, Tensor]) -> dict[str, ArrayBytes]:
    return {key: array_bytes(values) for key, values in observations.items()}


def open_server(host: str, port: int, env: Node, token: bytes) -> EnvironmentServer:
    """A server that listens.

    Raises:
        ExposedServerError: 2040, other machines could reach it without a token.
        AddressError: 3003, the address is taken or does not belong to this machine.
    """
    if not token and not is_loopback(host):
        raise ExposedServerError(
            f"--host {host} is reachable from other machines, where anyone could use the environments. Name a file "
            "with a long random token in --token-file, or leave out --host"
        )
    try:
        return EnvironmentServer((host, port), env, token)
    except OSError as error:
        raise AddressError(f"--host {host} --port {port} cannot be used: {error}. Give another one") from error


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def environment_node(recipe: str, overrides: Sequence[str]) -> Node:
    """The block pipeline.env of a recipe. Raises UsageError (2001) for a recipe without one, or of a remote one."""
    pipeline = load(recipe, overrides).root.require("pipeline", Node)
    env = pipeline.get("env", Node)
    if env is None or env.class_name == "RemoteEnvironment":
        has = "no pipeline.env" if env is None else "a RemoteEnvironment, which is the other end"
        raise UsageError(f"recipe {recipe} has {has}. Name a recipe whose policy acts in an environment of its own")
    return env


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m unirl.envs.serve", description="Serve environments to runs.")
    parser.add_argument("recipe", help="a recipe whose block pipeline.env is served")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=7000, help="0: any free one, which the first line says")
    parser.add_argument("--token-file", help="file with the token that runs must hold; required beyond this machine")
    options = parser.parse_intermixed_args(words)
    try:
        env = environment_node(options.recipe, options.overrides)
        server = open_server(options.host, options.port, env, read_token(options.token_file))
    except UniRLError as error:
        print(report(error), file=sys.stderr)
        return error.exit_status
    signal.signal(signal.SIGTERM, partial(signal.default_int_handler))
    host, port = cast(tuple[str, int], server.server_address)[:2]
    print(f"serving {env.class_name} at {host}:{port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
