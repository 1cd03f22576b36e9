"""The number of threads of each process of a run that computes on the CPU.

The number decides in which order the terms of a sum are added, so it changes bits. A checkpoint records it, and the run
that continues the checkpoint keeps it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from unirl.config.errors import DataError
from unirl.config.recipe import RecipeConfig
from unirl.plan.estimates import Estimated, estimate_of
from unirl.plan.machine import is_elsewhere
from unirl.plan.placement import plan_of
from unirl.types.device import num_accelerators

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables that set torch's number of threads. The first one that holds a number counts."""
SMALL = 20_000_000
"""Parameters below which one thread computes a model. Its operations last microseconds, and on a busy machine threads
that wait for each other make a step many times slower."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The limit on the processor time of a container: microseconds, or `max`, and the period."""


@dataclass(frozen=True)
class ThreadChoice:
    """The threads of each process of a run, and the reason for their number."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} per process ({self.why})"


@dataclass(frozen=True)
class Requested:
    """The number of threads that an environment variable sets."""

    count: int
    variable: str

    def __str__(self) -> str:
        return f"{self.variable}={self.count}"


@dataclass(frozen=True)
class Recorded:
    """The number of threads with which a checkpoint was computed."""

    count: int
    checkpoint: str


@dataclass(frozen=True)
class CpuState:
    """The cores of a machine, and how busy they are."""

    cores: int
    """The cores that this process may use."""
    load: float
    """Mean number of running processes over the last minute."""

    @property
    def free(self) -> int:
        """Cores without work, at least 1."""
        return max(1, round(self.cores - self.load))


def choose(
    cpu: CpuState,
    *,
    processes: int = 1,
    small: str | None = None,
    requested: Requested | None = None,
    recorded: Recorded | None = None,
) -> ThreadChoice:
    """The threads of each process: as recorded, else as requested, else 1 for small work, else a share of free cores.

    Args:
        processes: processes of the run on this machine that compute at the same time.
        small: what makes the work small, such as "toy scale". None for larger work.
    """
    if recorded is not None:
        ignored = (
            f"; {requested} is ignored, since it would change the bits of the run"
            if requested is not None and requested.count != recorded.count
            else ""
        )
        return ThreadChoice(recorded.count, f"recorded in {recorded.checkpoint}{ignored}")
    if requested is not None:
        return ThreadChoice(requested.count, requested.variable)
    change = f"{VARIABLES[0]} changes it"
    if small is not None:
        return ThreadChoice(1, f"{small}; {change}")
    share = f" / {processes} processes" if processes > 1 else ""
    return ThreadChoice(
        max(1, cpu.free // processes), f"{cpu.free} of {cpu.cores} cores free at load {cpu.load:.1f}{share}; {change}"
    )


def threads_of(config: RecipeConfig, recorded: Recorded | None = None) -> ThreadChoice | None:
    """The choice for a recipe on this machine.

    None for a run that computes on accelerators, and for one on a Ray cluster that runs already: they leave the number
    to torch and the cluster.

    Args:
        recorded: the threads of the checkpoint that the run continues.
    """
    if num_accelerators() or is_elsewhere(config):
        return None
    return choose(
        cpu_state(),
        processes=num_processes(config),
        small=reason_to_be_small(config),
        requested=requested_threads(os.environ),
        recorded=recorded,
    )


@contextmanager
def in_use(choice: ThreadChoice | None) -> Iterator[None]:
    """Within the block, operations of this process on the CPU use as many threads. None changes nothing."""
    before = torch.get_num_threads()
    if choice is not None:
        torch.set_num_threads(choice.count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def requested_threads(environ: Mapping[str, str]) -> Requested | None:
    """The number of threads that the environment sets. None if it sets none."""
    for name in VARIABLES:
        number = re.match(r"\s*(\d+)", environ.get(name, ""))  # OpenMP also reads one number per level, as in 4,2
        if number is not None and int(number[1]) > 0:
            return Requested(int(number[1]), name)
    return None


def reason_to_be_small(config: RecipeConfig) -> str | None:
    """Why the work of a recipe is small, in two words. None for larger work, and for a model of unknown size."""
    if config.scale == "toy":
        return "toy scale"
    owner = config.bundle.schema.owner
    if config.model_path is None or not isinstance(owner, Estimated):
        return None
    try:
        estimate = estimate_of(config)
    except DataError:  # a model of the hub that is not there yet
        return None
    return "small model" if sum(estimate.parameters.values()) < SMALL else None


def num_processes(config: RecipeConfig) -> int:
    """The processes of a run on each machine that compute at the same time."""
    if config.runtime_in_use == "local":
        return 1
    reward = plan_of(config).reward
    return config.devices_on_node + (len(reward) if reward.kind == "cpu" else 0)


def crowded(config: RecipeConfig) -> str | None:
    """Why the processes of a run on the CPU of this machine would wait for each other. None if each has a core."""
    processes, cores = num_processes(config), at_most_quota(os.cpu_count() or 1)
    if num_accelerators() or is_elsewhere(config) or processes <= cores:
        return None
    return (
        f"a run here would start {processes} processes for {cores} CPU core{'s' * (cores > 1)}, since this machine has "
        f"no GPU: they wait for each other, and each holds its libraries and weights. Set num_devices={cores} or less, "
        "or run on GPUs or a cluster (RAY_ADDRESS)"
    )


def cpu_state() -> CpuState:
    """The cores that this process may use, and the load of the machine."""
    return CpuState(at_most_quota(torch.get_num_threads()), os.getloadavg()[0])


def at_most_quota(cores: int) -> int:
    """The number of cores, or that of the container if it may use fewer."""
    try:
        quota, period = QUOTA.read_text().split()
        return cores if quota == "max" else min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # a system without this file
        return cores
