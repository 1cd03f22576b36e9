"""Messages between a run and its worker processes, as msgpack: arrays travel as their bytes."""

from __future__ import annotations

from typing import Any

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
    """[3, B] bool: terminated, truncated, success."""
    faults: dict[int, str] = {}
    """The reason by row of the request."""
    images: bytes = b""
    image_shape: tuple[int, ...] = ()
