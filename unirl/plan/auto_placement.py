"""Searches placements of a recipe by simulated steps, from the measured seconds of its phases.

The time of a phase is taken as proportional to the rows of the device that has the most. The time of a weight sync is
taken as it is. A reward on the host's CPUs, or behind a service, stays there, because its time elsewhere is unknown.

Training devices that join the engine are tried with the replica engine, and a free order with losses that read the
log-probs of the weights that sampled. A free order saves time only if generation takes longer in some steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from unirl.config.device_sets import spell
from unirl.config.errors import ConfigError, IncompatibleError
from unirl.config.load import Recipe, load
from unirl.config.recipe import AsynchronousConfig, RecipeConfig
from unirl.plan.alternatives import with_words
from unirl.plan.devices import Device
from unirl.plan.fit import moment_peaks, usable
from unirl.plan.micro_batch import with_auto_micro
from unirl.plan.placement import capabilities_of, plan_of
from unirl.plan.preflight import needs_of, preflight
from unirl.plan.simulate import LoopSchedule, PhaseSeconds, Place, Prediction, predict
from unirl.plan.sizes import sizes_of_policies
from unirl.plan.tiling import with_auto_tiling

MAX_STALENESS = 2
PARTS = 8
"""The value of `reward_parts` to try, beside 1."""
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
    lengths: Sequence[float] = (1.0,)
    """The time of generation in one step after another over its mean."""

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


def measured_on(config: RecipeConfig, seconds: PhaseSeconds, lengths: Sequence[float] = (1.0,)) -> MeasuredStep:
    """A step that ran with the placement of a recipe.

    Args:
        lengths: the time of generation in one step after another over its mean, which `seconds` has.
    """
    plan = plan_of(config)
    return MeasuredStep(
        seconds=seconds,
        num_rows=config.batch_size * config.samples_per_prompt,
        num_train=len(plan.train),
        num_rollout=len(plan.rollout),
        num_reward=len(plan.reward),
        lengths=lengths,
    )


@dataclass(frozen=True)
class PlacementCandidate:
    """A placement with its schedule, and the step that it predicts."""

    words: tuple[str, ...]
    """What sets it on the command line."""
    prediction: Prediction
    relation: Literal["shared", "in turns", "ahead"]
    """The roles share all devices, wait for each other on devices of their own, or generate ahead."""
    determinism: Literal["bitwise", "statistical"] = "bitwise"
    """`bitwise`: a second run has the same bits. `statistical`: it has the same distribution."""
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
            "determinism": self.determinism,
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


@dataclass(frozen=True)
class DeviceSplit:
    """The devices of each role."""

    num_train: int
    num_rollout: int = 0
    """0: the engine takes turns with the trainer on its devices."""
    num_reward: int = 0
    """0: the reward runs on the devices of the engine, or on the host's CPUs, where it was measured."""


def candidates(config: RecipeConfig, measured: MeasuredStep, num_devices: int) -> Iterator[PlacementCandidate]:
    """Every placement of `num_devices` whose updates divide, with its predicted step."""
    plan = plan_of(config)
    sizes = _sizes(num_devices)
    orders = list(_orders(config))
    for num_train in [*sizes, num_devices] if num_devices > 1 else [1]:
        if measured.num_rows % (config.num_updates * num_train):
            continue
        splits = [DeviceSplit(num_train, num_devices - num_train)]
        for num_reward in sizes if plan.reward.kind == "device" else []:
            splits.append(DeviceSplit(num_train, num_devices - num_train - num_reward, num_reward))
        for split in splits:
            if split.num_rollout == 0 or (split.num_rollout > 0 and plan.is_dedicated):
                yield from _of_split(config, measured, split, orders if split.num_rollout else orders[:1])


def _orders(config: RecipeConfig) -> Iterator[AsynchronousConfig]:
    """The settings to try: on policy in turns first, and last those that give up equal bits."""
    can_join = not capabilities_of(config.rollout).remote and config.row_transport == "object_store"
    for staleness in range(MAX_STALENESS + 1):
        yield AsynchronousConfig(max_staleness=staleness)
        if can_join:
            yield AsynchronousConfig(max_staleness=staleness, elastic=True)
    if config.refill is None and needs_of(config).fits_old_samples:
        for staleness in range(1, MAX_STALENESS + 1):
            yield AsynchronousConfig(max_staleness=staleness, order="free")


def _parts(order: AsynchronousConfig, place: Place) -> tuple[int, ...]:
    """The values of `reward_parts` to try. Parts need a reward on devices of its own, or devices that join."""
    if order.elastic:
        return (PARTS,)
    if place != "reward":
        return () if order.is_free else (1,)
    return (PARTS,) if order.is_free else (1, PARTS)


def _of_split(
    config: RecipeConfig, measured: MeasuredStep, split: DeviceSplit, orders: Sequence[AsynchronousConfig]
) -> Iterator[PlacementCandidate]:
    """The schedules of one split. Each is proposed only where it saves time over those before it."""
    outside = plan_of(config).reward.kind == "cpu"
    sampling = split.num_rollout or split.num_train
    place: Place = "reward" if split.num_reward or outside else "rollout" if split.num_rollout else "train"
    scoring = measured.num_reward if outside else split.num_reward or sampling
    turns: Literal["shared", "in turns"] = "in turns" if split.num_rollout or place == "reward" else "shared"
    seconds = measured.on(split.num_train, sampling, scoring)
    join = measured.on(split.num_train, split.num_train, scoring).generate
    fastest = math.inf
    for order, parts in ((each, parts) for each in orders for parts in _parts(each, place)):
        schedule = LoopSchedule(
            seconds=seconds,
            max_staleness=order.max_staleness,
            reward_parts=parts,
            reward_place=place,
            order=order.order,
            lengths=measured.lengths,
            join=join if order.elastic else None,
        )
        prediction = predict(schedule)
        if prediction.step_seconds < WORTHWHILE * fastest:
            fastest = prediction.step_seconds
            yield PlacementCandidate(
                words=_words(config, split, order, parts),
                prediction=prediction,
                relation="ahead" if order.max_staleness else turns,
                determinism="statistical" if order.is_free else "bitwise",
            )


def _words(config: RecipeConfig, split: DeviceSplit, order: AsynchronousConfig, parts: int) -> tuple[str, ...]:
    """The settings of the command line for a split and its schedule."""
    plan, train = plan_of(config), spell(range(split.num_train))
    sampling = split.num_train + split.num_rollout
    total = sampling + split.num_reward
    rollout = spell(range(split.num_train, sampling)) if split.num_rollout else train
    reward = spell(range(sampling, total)) if split.num_reward else ""
    if plan.reward.kind == "cpu":
        reward = str(plan.reward)
    roles = {"train": train, "rollout": rollout if plan.is_dedicated else "in train", "reward": reward or "in rollout"}
    return (
        "placement={" + ", ".join(f"{role}: {where}" for role, where in roles.items()) + "}",
        f"num_devices={total}",
        f"asynchronous.max_staleness={order.max_staleness}",
        f"reward_parts={parts}",
        *_named(order, config.asynchronous),
    )


def _named(order: AsynchronousConfig, own: AsynchronousConfig) -> Iterator[str]:
    """The settings of the command line for an order of events that is not the default or the recipe's."""
    for each in fields(order):
        value = getattr(order, each.name)
        if each.name != "max_staleness" and (value != each.default or value != getattr(own, each.name)):
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"asynchronous.{each.name}={text}"


def _sizes(num_devices: int) -> list[int]:
    """Sizes of a device set that leaves a device for another one: all; of many, powers of two and what these leave."""
    if num_devices <= EVERY_SPLIT:
        return list(range(1, num_devices))
    powers = [2**power for power in range((num_devices - 1).bit_length())]
    return sorted({*powers, *(num_devices - power for power in powers)})
