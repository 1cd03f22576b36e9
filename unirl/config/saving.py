"""The blocks of a recipe about checkpoints and restarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of the writing of checkpoints. `save_interval` and `keep_checkpoints` say when, and how many remain."""

    asynchronous: bool = True
    """Write and publish a checkpoint while the next steps run; a step waits only until its state is copied. Each
    process needs main memory for one more copy of what it saves."""
    keep_every: Annotated[int, Meta(ge=0)] = 0
    """Milestones: checkpoints of the steps that are its multiples remain, and of the others the newest
    `keep_checkpoints`. It is a multiple of `save_interval`; 0 = no milestones."""
    signing_key: str | None = None
    """Sign manifests with this secret key: `env:NAME` for an environment variable, or the path of a file with mode 600.
    The run then resumes only from checkpoints that are signed with it, and is not continued without the key."""
    copy_to: str | None = None
    """A URL where every checkpoint is copied after it is published: s3://bucket/run, gs://..., file:///disk2/run."""


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """Recovery inside one command: a run that lost a worker starts again from its newest checkpoint.

    All workers are replaced, and the results equal those of a run that was resumed by hand. Only a lost process, a
    lost machine or a call that stalled restarts a run; every other error ends it.
    """

    max: Annotated[int, Meta(ge=0)] = 3
    """The most restarts within `window_s`; 0 = never restart."""
    window_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Seconds after which a restart no longer counts."""
    wait_s: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds that a restart waits until a cluster at RAY_ADDRESS has the devices of the run again."""
    min_devices: Annotated[int, Meta(ge=1)] | None = None
    """The fewest devices on which a run goes on when too few are left for num_devices. Null = it ends then."""
