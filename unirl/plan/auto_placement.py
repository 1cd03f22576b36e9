"""Searches placements of a recipe by simulated steps, from the measured seconds of its phases.

The time of a phase is taken as proportional to the rows of the device that has the most. The time of a weight sync is
taken as it is. A reward on the host's CPUs, or behind a service, stays there, because its time elsewhere is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unirl.config.device_sets import spell
from unirl.config.errors import ConfigError, IncompatibleError
from unirl.config.load import Recipe, load
from unirl.config.recipe import RecipeConfig
from unirl.plan.alternatives import with_words
from unirl.plan.devices import Device
from unirl.plan.fit import moment_peaks, usable
from unirl.plan.micro_batch import with_auto_micro
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.plan.preflight import preflight
from unirl.plan.simulate import LoopSchedule, PhaseSeconds, Place, Prediction, predict
from unirl.plan.sizes import sizes_of_policies
from unirl.plan.tiling import with_auto_tiling

MAX_STALENESS = 2
PARTS = (1, 8)
"""Values of `reward_parts` to try."""
EVERY_SPLIT = 16
"""With more devices, only some sizes of device sets are tried."""
WORTHWHILE = 0.99
"""A schedule is proposed if its step takes at most this share of the time of a simpler one."""
MAX_TRIES = 40
"""Candidates that are loaded as a recipe and checked, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Seconds of each phase of a step that ran in turns, and the devices that it had."""

    seconds: PhaseSeconds
    num_rows: int
    num_train: int
    num_rollout: int
    num_reward: int

    def on(self, num_train: int, num_rollout: int, num_reward: int) -> PhaseSeconds:
        """The seconds with other numbers of devices."""
        return PhaseSeconds(
            generate=self.seconds.generate * self._share(num_rollout) / self._share(self.num_rollout),
            score=self.seconds.score * self._share(num_reward) / self._share(self.num_reward),
            train=self.seconds.train * self._share(num_train) / self._share(self.num_train),
            sync=self.seconds.sync,
        )

    def _share(self, num_devices: int) -> int:
        """The rows of the device that has the most."""
        return math.ceil(self.num_rows / num_devices)


def measured_on(config: RecipeConfig, seconds: PhaseSeconds) -> MeasuredStep:
    """A step that ran with the placement of a recipe."""
    plan = plan_of(config)
    return MeasuredStep(
        seconds=seconds,
        num_rows=config.batch_size * config.samples_per_prompt,
        num_train=len(plan.train),
        num_rollout=len(plan.rollout),
        num_reward=len(plan.reward),
    )


@dataclass(frozen=True)
class PlacementCandidate:
    """A placement with its schedule, and the step that it predicts."""

    words: tuple[str, ...]
    """What sets it on the command line."""
    prediction: Prediction
    relation: Literal["shared", "in turns", "ahead"]
    """The roles share all devices, wait for each other on devices of their own, or generate ahead."""
    peak_gib: float | None = None
    """The highest peak of memory on a device. None if the recipe's bundle cannot say its sizes."""

    @property
    def reason(self) -> str:
        """What limits the step."""
        if self.relation == "shared":
            return "all roles take turns on the same devices"
        place = self.prediction.bottleneck
        share = f"the devices of {place} work {self.prediction.busy[place]:.0%} of the step"
        return f"the roles take turns; {share}" if self.relation == "in turns" else share

    def facts(self) -> dict[str, object]:
        """The candidate as JSON values."""
        return {
            "words": list(self.words),
            "step_seconds": self.prediction.step_seconds,
            "bottleneck": self.prediction.bottleneck,
            "busy": dict(self.prediction.busy),
            "peak_gib": self.peak_gib,
        }


def best_placements(
    recipe: Recipe, words: Sequence[str], measured: MeasuredStep, num_devices: int, device: Device, count: int = 5
) -> list[PlacementCandidate]:
    """The fastest placements that are legal and fit a device, the fastest first.

    Args:
        words: the settings of the command line, which the placements replace where they name the same keys.
        device: its memory decides what fits.

    Raises:
        ConfigError: 2020 for a recipe of several policies or with groups of nodes, and when no placement of these
            devices is legal.
    """
    if len(recipe.policies) > 1:
        raise IncompatibleError(f"{recipe.file.name} has several policies, and --auto places one. Place them by hand")
    if recipe.config.node_groups:
        raise IncompatibleError(
            f"{recipe.file.name} has node_groups, and --auto divides equal devices between the roles. Search with "
            "node_groups=null and devices of one kind, or place the roles on the groups by hand"
        )
    ordered = sorted(candidates(recipe.config, measured, num_devices), key=lambda each: each.prediction.step_seconds)
    found: list[PlacementCandidate] = []
    refusals: list[str] = []
    for candidate in ordered:
        if len(found) == count or len(found) + len(refusals) == MAX_TRIES:
            break
        try:
            peak = _peak_of(recipe, with_words(words, candidate.words), device)
        except ConfigError as error:
            refusals.append(str(error).splitlines()[0])
            continue
        if peak is None or peak <= usable(device.memory_gib):
            found.append(replace(candidate, peak_gib=peak))
        else:
            refusals.append(f"{peak:.1f} GiB do not fit {device.name}")
    if not found:
        why = f": {refusals[0]}" if refusals else ": its updates cannot be divided over them"
        raise IncompatibleError(f"{recipe.file.name} has no placement on {num_devices} devices{why}. Try --devices N")
    return found


def _peak_of(recipe: Recipe, words: Sequence[str], device: Device) -> float | None:
    """GiB at the peak of the recipe with other settings, which are checked."""
    changed = load(recipe.file.argument, words)
    preflight(changed)
    (sizes,) = sizes_of_policies(changed).values()
    if sizes.run is None:
        return None
    run = with_auto_micro(with_auto_tiling(sizes.run, sizes.config, device.memory_gib), device, device.memory_gib)
    return max(moment_peaks(run, run.settings).values())


def candidates(config: RecipeConfig, measured: MeasuredStep, num_devices: int) -> Iterator[PlacementCandidate]:
    """Every placement of `num_devices` whose updates divide, with its predicted step."""
    plan = plan_of(config)
    sizes = _sizes(num_devices)
    for num_train in [*sizes, num_devices] if num_devices > 1 else [1]:
        if measured.num_rows % (config.num_updates * num_train):
            continue
        if num_train == num_devices:
            yield from _of_layout(plan, measured, num_train, 0, 0)
        elif plan.is_dedicated:
            yield from _of_layout(plan, measured, num_train, num_devices - num_train, 0)
        beside = sizes if plan.reward.kind == "device" else []
        for num_reward in beside:
            num_rollout = num_devices - num_train - num_reward
            if num_rollout == 0 or (num_rollout > 0 and plan.is_dedicated):
                yield from _of_layout(plan, measured, num_train, num_rollout, num_reward)


def _of_layout(
    plan: PlacementPlan, measured: MeasuredStep, num_train: int, num_rollout: int, num_reward: int
) -> Iterator[PlacementCandidate]:
    """The schedules of one layout. Older samples and more parts are tried only where they save time.

    Args:
        num_rollout: 0 = the engine takes turns with the trainer on its devices.
        num_reward: 0 = the reward runs on the devices of the engine, or on the host's CPUs, where it was measured.
    """
    outside = plan.reward.kind == "cpu"
    place: Place = "reward" if num_reward or outside else "rollout" if num_rollout else "train"
    scoring = len(plan.reward) if outside else num_reward or num_rollout or num_train
    turns: Literal["shared", "in turns"] = "in turns" if num_rollout or place == "reward" else "shared"
    seconds = measured.on(num_train, num_rollout or num_train, scoring)
    fastest = math.inf
    for staleness in range(MAX_STALENESS + 1) if num_rollout else [0]:
        for parts in PARTS if place == "reward" else [1]:
            schedule = LoopSchedule(seconds=seconds, max_staleness=staleness, reward_parts=parts, reward_place=place)
            prediction = predict(schedule)
            if prediction.step_seconds < WORTHWHILE * fastest:
                fastest = prediction.step_seconds
                words = _words(plan, num_train, num_rollout, num_reward, schedule)
                yield PlacementCandidate(words, prediction, "ahead" if staleness else turns)


def _words(
    plan: PlacementPlan, num_train: int, num_rollout: int, num_reward: int, schedule: LoopSchedule
) -> tuple[str, ...]:
    """What sets a layout and its schedule on the command line."""
    total = num_train + num_rollout + num_reward
    sampling = num_train + num_rollout
    rollout = spell(range(num_train, sampling)) if num_rollout else spell(range(num_train))
    reward = spell(range(sampling, total)) if num_reward else str(plan.reward) if plan.reward.kind == "cpu" else ""
    roles = {"train": spell(range(num_train)), "rollout": rollout if plan.is_dedicated else "in train"}
    roles |= {"reward": reward or "in rollout"}
    return (
        "placement={" + ", ".join(f"{role}: {where}" for role, where in roles.items()) + "}",
        f"num_devices={total}",
        f"asynchronous.max_staleness={schedule.max_staleness}",
        f"reward_parts={schedule.reward_parts}",
    )


def _sizes(num_devices: int) -> list[int]:
    """Sizes of a device set that leaves a device for another one: all; of many, powers of two and what these leave."""
    if num_devices <= EVERY_SPLIT:
        return list(range(1, num_devices))
    powers = [2**power for power in range((num_devices - 1).bit_length())]
    return sorted({*powers, *(num_devices - power for power in powers)})
