"""The blocks of a recipe about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written. `save_interval` and `keep_checkpoints` say when, and how many remain."""

    asynchronous: bool = False
    """Write and publish a checkpoint while the next steps run; a step waits only until its state is copied. Each
    process needs main memory for one more copy of what it saves."""
