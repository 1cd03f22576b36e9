"""Searches the settings that change no result but by rounding, for the fastest that fits into memory.

`ORDER` is the ladder for a run that is out of memory: what costs the least time comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from unirl.config.device_sets import DeviceSet
from unirl.plan.cost import MOMENTS, STEP_PHASES, Settings, step_seconds, step_times
from unirl.plan.devices import Device
from unirl.plan.sizes import RunSizes

ALLOCATOR_SLACK = 0.08
"""Fraction of the memory that stays free: the context of the driver, fragmentation and workspaces."""
ROLES: Mapping[str, str] = {"generate": "rollout", "reward": "reward"}
"""The role that works in a phase of the loop; in all other phases it is the trainer."""
LEAST_SAVING = 0.01
"""GiB that a change must save to be worth a line."""
FEW_CHUNKS, MOST_ROWS = 16, 512
"""`rollout.forward_batch_size` is tried at up to this many equal chunks, and at powers of two, up to this many rows."""
FASTER = 0.99
"""A change counts as a gain if it takes at most this fraction of the time."""


@dataclass(frozen=True)
class Rung:
    """One setting that trades memory for time."""

    key: str
    """Of the recipe."""
    field: str
    """Of `Settings`."""
    shown: Callable[[int], str] = str
    """How a value of the field is written in the recipe."""


def _flag(value: int) -> str:
    return "true" if value else "false"


MICRO = Rung("stack.micro_batch_size", "micro_rows")
FORWARD = Rung("rollout.forward_batch_size", "forward_rows")
RECOMPUTE = Rung("backend.fsdp_cfg.activation_checkpointing", "recompute", _flag)
RESIDENT = Rung("pipeline.keep_resident", "keep_resident", _flag)
SHARDS = Rung("backend.fsdp_cfg.shard_size", "num_shards")
RESHARD = Rung("backend.fsdp_cfg.reshard_after_forward", "reshard", _flag)
DEFERRED = Rung("backend.fsdp_cfg.defer_grad_sync", "deferred", _flag)
PASSES = Rung("sampling.guidance_passes", "guidance_passes")
DECODE = Rung("pipeline.decode_batch_size", "decode_rows")
COMPILE = Rung("backend.fsdp_cfg.use_torch_compile", "compiled", _flag)
RUNGS = (MICRO, FORWARD, RECOMPUTE, RESIDENT, SHARDS, RESHARD, DEFERRED, PASSES, DECODE)
"""The settings that `search` chooses. Compilation is left to the user, since it may fall back without a word."""
ORDER = (DECODE, MICRO, FORWARD, RECOMPUTE, PASSES, RESHARD, DEFERRED, SHARDS, RESIDENT)
"""The order in which memory is saved: what costs the least time comes first."""


IDLE: Mapping[str, Sequence[Rung]] = {
    "train": (FORWARD, PASSES, DECODE),
    "generate": (MICRO, RECOMPUTE, RESHARD, DEFERRED),
}
"""Settings that change neither the time nor the memory of a phase."""


@dataclass(frozen=True)
class Candidate:
    """A run with certain settings, and what the cost model says about it."""

    settings: Settings
    seconds: float
    peak_gib: float
    peak_at: str
    """The moment of the peak, one of `MOMENTS`."""


def candidate(run: RunSizes, settings: Settings, device: Device) -> Candidate:
    """The run with these settings."""
    peaks = moment_peaks(run, settings)
    at = max(peaks, key=lambda moment: peaks[moment])
    return Candidate(settings, step_seconds(run.sizes, settings, device), peaks[at], at)


def moment_peaks(run: RunSizes, settings: Settings) -> dict[str, float]:
    """GiB at each moment of a step, on the devices that need the most."""
    homes = device_peaks(run, settings)
    return {moment: max(sums[moment] for sums in homes.values()) for moment in MOMENTS}


def device_peaks(run: RunSizes, settings: Settings) -> dict[DeviceSet, dict[str, float]]:
    """GiB at each moment of a step, on a device of each device set."""
    homes: dict[DeviceSet, dict[str, float]] = {}
    for home, row in run.memory_with(settings):
        sums = homes.setdefault(home, dict.fromkeys(MOMENTS, 0.0))
        for moment, gib in row.gib.items():
            sums[moment] += gib
    return homes


def usable(memory_gib: float) -> float:
    """What a run may plan for on a device with so much memory."""
    return memory_gib * (1 - ALLOCATOR_SLACK)


def values_of(run: RunSizes, rung: Rung) -> Sequence[int]:
    """The values that a setting may have in this run."""
    geometry, now = run.geometry, vars(run.settings)[rung.field]
    num_devices = run.sizes.num_train_devices
    if rung is MICRO:
        if geometry.micro_batch_tokens is not None:
            return (now,)
        return sorted({now, *geometry.micro_sizes})
    if rung is FORWARD:
        if not run.chooses_rows:
            return (now,)
        rows = max(run.sizes.num_samples // run.sizes.num_engine_devices, 1)
        equal = {-(-rows // count) for count in range(1, FEW_CHUNKS + 1)}
        return sorted({now, *(size for size in {*equal, *_powers(rows)} if size <= MOST_ROWS)})
    if rung is SHARDS:
        return [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    if rung is PASSES:
        denoises = not run.sizes.network.cache_width  # a language model decodes both branches of a sample together
        return (1, 2) if run.sizes.network_rows > 1 and denoises else (now,)
    if rung is DECODE:
        return sorted({1, now}) if run.sizes.decoding.peak_bytes else (now,)
    if rung in (RESHARD, DEFERRED):
        return (now, not now) if num_devices > 1 else (now,)
    if rung is RESIDENT:
        return (now, not now) if run.sizes.encoder_parameters else (now,)
    return (now, not now)


def _powers(largest: int) -> Iterator[int]:
    value = 1
    while value <= largest:
        yield value
        value *= 2


@dataclass(frozen=True)
class Fit:
    """The outcome of a search."""

    best: Candidate | None
    """The fastest settings that fit, with the fewest changes among those that are about as fast."""
    smallest: Candidate
    """The settings that need the least memory."""
    next_faster: Candidate | None
    """The settings that would be faster than the best and need the least memory of these, but too much."""


def search(run: RunSizes, device: Device, memory_gib: float, kept: Collection[str] = ()) -> Fit:
    """Evaluates all settings of a run on devices with so much memory.

    Args:
        kept: keys of the recipe that are not changed.
    """
    scored = list(_candidates(run, device, memory_gib, kept))
    fitting = [each for each in scored if each.peak_gib <= usable(memory_gib)]
    smallest = min(scored, key=lambda each: (each.peak_gib, len(overrides(run, each.settings)), each.seconds))
    if not fitting:
        return Fit(None, smallest, None)
    fastest = min(each.seconds for each in fitting)
    about = [each for each in fitting if each.seconds <= fastest / FASTER]
    best = min(about, key=lambda each: (len(overrides(run, each.settings)), each.peak_gib))
    faster = [each for each in scored if each.seconds < FASTER * fastest]
    return Fit(best, smallest, min(faster, key=lambda each: each.peak_gib) if faster else None)


def _candidates(run: RunSizes, device: Device, memory_gib: float, kept: Collection[str]) -> Iterator[Candidate]:
    """All settings that can be the best, the smallest, or the next faster.

    Micro-batch and chunk have many values, but the one changes training alone and the other sampling alone. So for each
    combination of the other settings, a few values of each are enough.
    """
    axes = [
        [(rung.field, value) for value in _free_values(run, rung, kept)]
        for rung in RUNGS
        if rung not in (MICRO, FORWARD)
    ]
    known: dict[Settings, set[int]] = {}

    def few(rung: Rung, phase: str, settings: Settings) -> set[int]:
        # Settings that do not act in this phase are those of the run, so that equal searches are done once.
        idle = {other.field: vars(run.settings)[other.field] for other in IDLE[phase]}
        seen = _with(settings, idle)
        key = _with(seen, {rung.field: 0})
        if key not in known:
            known[key] = _few_values(run, seen, rung, phase, device, memory_gib, kept)
        return known[key]

    for choice in product(*axes):
        settings = _with(run.settings, dict(choice))
        if not _has_effect(settings):
            continue
        for micro, forward in product(few(MICRO, "train", settings), few(FORWARD, "generate", settings)):
            yield candidate(run, _with(settings, {MICRO.field: micro, FORWARD.field: forward}), device)


def _free_values(run: RunSizes, rung: Rung, kept: Collection[str]) -> Sequence[int]:
    """The values that the search may give to a setting."""
    return (vars(run.settings)[rung.field],) if rung.key in kept else values_of(run, rung)


def _few_values(
    run: RunSizes,
    settings: Settings,
    rung: Rung,
    phase: str,
    device: Device,
    memory_gib: float,
    kept: Collection[str],
) -> set[int]:
    """The values of a setting that acts in one phase alone which are worth combining with others.

    They are the present one, the one with the smallest peak, and the smallest ones that are about as fast as the
    fastest: of all, and of those that fit.
    """
    peaks, seconds = {}, {}
    for value in _free_values(run, rung, kept):
        changed = _with(settings, {rung.field: value})
        moments = moment_peaks(run, changed)
        peaks[value] = max(moments[moment] for moment in STEP_PHASES[phase])
        seconds[value] = step_times(run.sizes, changed, device)[phase].seconds
    now, values = vars(run.settings)[rung.field], list(peaks)
    few = {now, min(values, key=lambda value: peaks[value])}
    for group in (values, [value for value in values if peaks[value] <= usable(memory_gib)]):
        if group:
            enough = min(seconds[value] for value in group) / FASTER
            few.add(min((value for value in group if seconds[value] <= enough), key=lambda value: peaks[value]))
    return few & set(values)


def _with(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with other values of some fields."""
    return replace(settings, **changes)


def _has_effect(settings: Settings) -> bool:
    """False for settings of sharding where nothing is sharded."""
    return settings.num_shards > 1 or (settings.reshard and not settings.deferred)


def overrides(run: RunSizes, settings: Settings) -> list[str]:
    """The words that change the recipe to these settings."""
    words = []
    for rung in (*RUNGS, COMPILE):
        value, now = vars(settings)[rung.field], vars(run.settings)[rung.field]
        if value != now:
            words.append(f"{rung.key}={rung.shown(value)}")
    return words


@dataclass(frozen=True)
class Gain:
    """A change of one setting, and what the step takes with it."""

    word: str
    seconds: float
    peak_gib: float


def best_changes(run: RunSizes, device: Device, memory_gib: float, count: int = 3) -> list[Gain]:
    """The single changes that would make a step the fastest and fit into memory, each evaluated by the model."""
    now = candidate(run, run.settings, device)
    gains = []
    for rung in (*RUNGS, COMPILE):
        choices = []
        for value in values_of(run, rung) if rung is not COMPILE else (True,):
            changed = candidate(run, _with(run.settings, {rung.field: value}), device)
            if changed.seconds < FASTER * now.seconds and changed.peak_gib <= max(usable(memory_gib), now.peak_gib):
                choices.append(changed)
        if choices:
            # The smallest change with nearly all of the gain.
            fastest = min(each.seconds for each in choices)
            chosen = next(each for each in choices if each.seconds <= 1.02 * fastest)
            [word] = overrides(run, chosen.settings)
            gains.append(Gain(word, chosen.seconds, chosen.peak_gib))
    return sorted(gains, key=lambda gain: gain.seconds)[:count]


@dataclass(frozen=True)
class Saving:
    """A change of one setting that lowers a peak which is too high."""

    word: str
    gib: float
    moment: str
    """The moment whose peak it lowers the most, of those that do not fit."""


def savings(run: RunSizes, memory_gib: float, kept: Collection[str] = ()) -> list[Saving]:
    """The single changes that save memory at the moments that do not fit, the largest gain first."""
    now = moment_peaks(run, run.settings)
    too_high = [moment for moment in MOMENTS if now[moment] > usable(memory_gib)]
    result = []
    for rung in RUNGS:
        gains = []
        for value in _free_values(run, rung, kept):
            settings = _with(run.settings, {rung.field: value})
            peaks = moment_peaks(run, settings)
            for moment in too_high if _has_effect(settings) else ():
                gains.append((now[moment] - peaks[moment], value, moment))
        gib, value, moment = max(gains, key=lambda gain: gain[0], default=(0.0, 0, ""))
        if gib >= LEAST_SAVING:
            [word] = overrides(run, _with(run.settings, {rung.field: value}))
            result.append(Saving(word, gib, moment))
    return sorted(result, key=lambda saving: -saving.gib)


def next_rung(run: RunSizes, phase: str) -> str | None:
    """The first word of the ladder that lowers the peak of a phase of the loop. None at the end of the ladder."""
    moments = STEP_PHASES[phase]
    now = max(moment_peaks(run, run.settings)[moment] for moment in moments)
    for rung in ORDER:
        value = vars(run.settings)[rung.field]
        for lower in _lower(rung, value, values_of(run, rung)):
            changed = _with(run.settings, {rung.field: lower})
            peaks = moment_peaks(run, changed)
            if max(peaks[moment] for moment in moments) < 0.99 * now:
                return overrides(run, changed)[0]
    return None


def _lower(rung: Rung, now: int, values: Sequence[int]) -> list[int]:
    """The values that need less memory than the present one, the nearest first: of a number of rows, half or less."""
    more_is_less = rung in (RECOMPUTE, SHARDS, PASSES, RESHARD)
    if rung in (MICRO, FORWARD):
        return sorted((v for v in values if v <= now // 2), reverse=True)
    return sorted((v for v in values if (v > now if more_is_less else v < now)), reverse=not more_is_less)


def largest_items(run: RunSizes, settings: Settings, moment: str, count: int = 3) -> list[tuple[str, float]]:
    """What takes the most memory at a moment of a step, and its GiB."""
    items = sorted(((row.name, row.gib[moment]) for _, row in run.memory_with(settings)), key=lambda item: -item[1])
    return [item for item in items[:count] if item[1] > 0]


def items_text(run: RunSizes, settings: Settings, moment: str) -> str:
    """The largest items of a moment, for people."""
    return ", ".join(f"{name} {gib:.2f}" for name, gib in largest_items(run, settings, moment))


def shortage(run: RunSizes, phase: str) -> str:
    """What the plan says about a phase that ran out of memory: its role, its estimate, and the next setting to turn."""
    phase = "generate" if phase == "eval" else phase
    peaks = moment_peaks(run, run.settings)
    moment = max(STEP_PHASES[phase], key=lambda each: peaks[each])
    word = next_rung(run, phase)
    advice = f"Next on the ladder: {word}" if word else "No setting of this recipe needs less: use more devices"
    return (
        f"phase {phase}, role {ROLES.get(phase, 'train')}: the plan's estimate is {peaks[moment]:.2f} GiB on a device "
        f"({items_text(run, run.settings, moment)}). {advice}"
    )
