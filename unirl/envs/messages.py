"""Messages of a run to its worker processes or to an environment server, as msgpack: arrays travel as their bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unirl.envs.slots import Source

MOST_BYTES = 2**31
"""A message may have this many bytes."""


class Opening(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    source: Source
    python_path: list[str]
    """`sys.path` of the run, so that the worker finds the modules of the run's own environments."""


class Ready(msgspec.Struct, frozen=True):
    """The answer to an opening, once an environment is made. `reason` says why none could be."""

    reason: str = ""


class ResetRequest(msgspec.Struct, frozen=True, tag="reset"):
    """Start an episode in each slot."""

    slots: list[int]
    seeds: list[int]
    options: list[dict[str, Any]]


class StepRequest(msgspec.Struct, frozen=True, tag="step"):
    """Take one action in each slot."""

    slots: list[int]
    actions: bytes


class RenderRequest(msgspec.Struct, frozen=True, tag="render"):
    """Draw each slot."""

    slots: list[int]


Request = ResetRequest | StepRequest | RenderRequest


class SlotsReply(msgspec.Struct, frozen=True):
    """The answer to any request. Fields that it does not need are empty."""

    observations: dict[str, bytes] = {}
    rewards: bytes = b""
    ends: bytes = b""
    """[2, B] bool: terminated, truncated."""
    success: bytes = b""
    """[B] int8: 1 success, 0 none, -1 not reported."""
    faults: dict[int, str] = {}
    """The reason by row of the request."""
    images: bytes = b""
    image_shape: tuple[int, ...] = ()


# Between a run and an environment server

PROTOCOL = 3
"""The version of the messages below. Both ends must have the same."""


class Banner(msgspec.Struct, frozen=True):
    """The first message of a server."""

    protocol: int
    nonce: bytes
    needs_token: bool


class Hello(msgspec.Struct, frozen=True):
    """The answer of a run: HMAC-SHA256 of the nonce with the token, so that the token itself is never sent."""

    proof: bytes
    timeout_s: float
    """Seconds that a request may take before the server gives up the environments of this connection."""


class Welcome(msgspec.Struct, frozen=True):
    """The environment of a connection, or in `reason` why there is none."""

    reason: str = ""
    observations: dict[str, tuple[int, ...]] = {}
    discrete: int | None = None
    """The number of discrete actions. None: actions are `continuous` numbers."""
    continuous: int | None = None
    most_steps: int | None = None
    chunk: int = 1
    is_keyed: bool = True


class StartsRequest(msgspec.Struct, frozen=True, tag="starts"):
    """Start an episode in each slot."""

    slots: list[int]
    seeds: list[int]
    tasks: list[str]
    options: list[dict[str, Any]]


ServerRequest = StartsRequest | StepRequest | RenderRequest


class ArrayBytes(msgspec.Struct, frozen=True):
    """An array."""

    dtype: Literal["uint8", "float32", "int64"]
    shape: tuple[int, ...]
    data: bytes


class ServerReply(msgspec.Struct, frozen=True):
    """The answer to a ServerRequest. `error` says why there is none; fields that it does not need are empty."""

    error: str = ""
    observations: dict[str, ArrayBytes] = {}
    rewards: bytes = b""
    ends: bytes = b""
    """[2, B] bool: terminated, truncated."""
    success: bytes = b""
    """[B] int8: 1 success, 0 none, -1 not reported."""
    faults: dict[int, str] = {}
    images: ArrayBytes | None = None
