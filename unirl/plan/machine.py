"""Whether the machine of a run can hold its recipe: the GPUs that it shows, and their memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.config.device_sets import DeviceSet
from unirl.config.errors import MemoryShortageError, ResourceError, UnsupportedEnvironmentError
from unirl.config.recipe import RecipeConfig
from unirl.plan.pipelines import RestrictedPipeline
from unirl.plan.placement import plan_of
from unirl.rollout.engine.serving.engine import ServingEngine
from unirl.types.device import (
    VISIBLE,
    DeviceKind,
    accelerator,
    device_kind,
    num_accelerators,
    num_installed,
    unusable_gpu,
    visibility_problem,
)

if TYPE_CHECKING:
    from unirl.config.load import Recipe
    from unirl.plan.sizes import RecipeSizes, RunSizes

CERTAIN = 1.1
"""A plan agrees with arithmetic by hand within 10 %. A peak above the memory by more than that is refused."""


def check_machine(sizes: RecipeSizes, warn: Callable[[str], None]) -> None:
    """Refuses a run that this machine cannot hold, before any process starts.

    The devices of a Ray cluster that runs already are counted when its pool opens, and their memory is compared when
    its workers have started (`Pool.check_device`).

    Raises:
        DependencyError: 3002 when the run would compute on the CPU because PyTorch cannot use the machine's GPU. A run
            of toy scale warns.
        ResourceError: 5001 when the process sees fewer GPUs than the recipe needs, 5002 when a GPU is too small.
    """
    config, why = sizes.config, unusable_gpu()
    if why is not None:
        if config.scale != "toy":
            raise UnsupportedEnvironmentError(why)
        warn(why)
    if is_elsewhere(config):
        return
    hidden = hidden_devices(config)
    if hidden is not None:
        raise ResourceError(hidden)
    if num_accelerators() and config.scale != "toy":
        check_memory(sizes, largest_device(), warn)


def largest_device() -> DeviceKind:
    """The kind of this machine's device with the most memory. Roles that need less may use the others."""
    kinds = [device_kind(accelerator(index)) for index in range(num_accelerators())]
    return max(kinds, key=lambda kind: kind.memory_gib or 0.0)


def is_elsewhere(config: RecipeConfig) -> bool:
    """True for a run on the devices of a Ray cluster that runs already."""
    return config.runtime_in_use == "ray" and os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def scores_elsewhere(config: RecipeConfig) -> bool:
    """True for a run on several machines, whose reward may be on another one than the driver."""
    return bool(config.node_groups) or config.devices_per_node not in (None, config.num_devices)


def check_engines(recipe: Recipe) -> None:
    """Refuse a run whose servers or environments cannot be started here. Raises DependencyError (3001).

    With a cluster, only its nodes can tell.
    """
    for policy in recipe.policies.values():
        engine, pipeline = policy.rollout.schema.owner, policy.pipeline.schema.owner
        if is_elsewhere(policy):
            continue
        if issubclass(engine, ServingEngine):
            engine.check_start(policy.rollout.values)
        if isinstance(pipeline, RestrictedPipeline):
            pipeline.check_installed(policy.pipeline.values)


def hidden_devices(config: RecipeConfig) -> str | None:
    """Why this process sees fewer GPUs than a run needs, and the ways out.

    None if it sees enough, or if the machine has none and the run computes on the CPU. With runtime=local, one GPU is
    enough: device sets share it.
    """
    seen, installed, setting = num_accelerators(), num_installed(), os.environ.get(VISIBLE)
    needed = 1 if config.runtime_in_use == "local" else config.devices_on_node
    if seen >= needed or (seen == 0 and not _needs_gpu(config, installed, setting)):
        return None
    variables = [name for name in (VISIBLE, "NVIDIA_VISIBLE_DEVICES") if name in os.environ]
    problem = None if setting is None else visibility_problem(setting, installed)
    on_cpu = f"{VISIBLE}=-1 to compute on the CPU"
    show = f"Show {needed} GPUs with {VISIBLE}, " if max(seen, installed) >= needed and variables else ""
    return " ".join(
        [
            f"the run needs {needed} GPUs on this machine ({plan_of(config).describe()}), and this process sees {seen}"
            + (f" of {installed}" if installed > seen else "")
            + (f" with {' and '.join(f'{name}={os.environ[name]}' for name in variables)}." if variables else "."),
            *([f"{problem}."] if problem else []),
            f"{show}{'or set' if show else 'Set'} num_devices={max(seen, 1)}, or {on_cpu}",
        ]
    )


def _needs_gpu(config: RecipeConfig, installed: int, setting: str | None) -> bool:
    """True if a GPU of this machine stays unseen and nobody asked for the CPU, which -1 does, and toy scale suits."""
    return installed > 0 and config.scale != "toy" and (setting or "").strip() != "-1"


@dataclass(frozen=True)
class Peak:
    """The largest memory of a run on a device, by its plan."""

    run: RunSizes
    gib: float
    at: str
    """The moment of a step, one of `unirl.plan.cost.MOMENTS`."""


def peak_of(sizes: RecipeSizes, devices: DeviceSet | None = None, memory_gib: float | None = None) -> Peak | None:
    """The plan's peak. None if the recipe's bundle cannot say the sizes of its model without loading it.

    Args:
        devices: the device set whose peak is wanted. None: the one that needs the most.
        memory_gib: memory of a device, on which the VAE decodes in tiles where it must. None: it decodes whole samples.
    """
    from unirl.plan.fit import device_peaks, moment_peaks
    from unirl.plan.tiling import with_auto_tiling

    run = sizes.run
    if run is None:
        return None
    if memory_gib is not None:
        run = with_auto_tiling(run, sizes.config, memory_gib)
    peaks = moment_peaks(run, run.settings) if devices is None else device_peaks(run, run.settings).get(devices)
    if peaks is None:
        return None
    at = max(peaks, key=lambda moment: peaks[moment])
    return Peak(run, peaks[at], at)


def _kept(peak: Peak) -> str:
    """The part of a peak that other policies of the recipe keep: `, of which 2.1 GiB belong to ar, which waits`."""
    kept = [row for rows in peak.run.beside.values() for row in rows if row.gib[peak.at]]
    return "".join(f", of which {row.gib[peak.at]:.1f} GiB belong to {row.name}" for row in kept)


def check_memory(
    sizes: RecipeSizes, kind: DeviceKind, warn: Callable[[str], None], devices: DeviceSet | None = None
) -> None:
    """Compares the plan's peak with the memory of a device, and names settings that fit.

    Args:
        devices: the device set that has such devices. None: the one that needs the most.

    Raises:
        MemoryShortageError: 5002 when the peak exceeds the memory by more than the error of a plan. A smaller excess
            is a warning, and so is any with `memory_check: warn`.
    """
    from unirl.plan.devices import device_named
    from unirl.plan.fit import search, usable, words_of

    peak = peak_of(sizes, devices, kind.memory_gib)
    if kind.memory_gib is None or peak is None or peak.gib <= (room := usable(kind.memory_gib)):
        return
    run = peak.run
    fit = search([run], device_named(None)[0], kind.memory_gib)
    if fit.best is not None:
        way_out = f"These settings fit: {' '.join(words_of(fit.best.changes))}"
    else:
        way_out = (
            f"The smallest settings need {fit.smallest.peak_gib:.1f} GiB "
            f"({' '.join(words_of(fit.smallest.changes))}): use more or larger devices"
        )
    text = (
        f"the plan's estimate of the peak is {peak.gib:.1f} GiB on a device (at {peak.at}{_kept(peak)}), and "
        f"{kind.name} has {kind.memory_gib:.1f} GiB, of which {room:.1f} can be planned for: "
        f"{peak.gib - room:.1f} GiB too much. {way_out}"
    )
    if peak.gib > CERTAIN * kind.memory_gib and sizes.config.memory_check == "refuse":
        raise MemoryShortageError(f"{text}. Plans are counted: memory_check=warn tries it nevertheless")
    warn(text)
