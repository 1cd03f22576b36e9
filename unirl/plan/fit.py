"""Searches the settings that change no result but by rounding, for the fastest that fits into memory.

`ORDER` is the ladder for a run that is out of memory: what costs the least time comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from unirl.config.device_sets import DeviceSet
from unirl.plan.cost import MOMENTS, STEP_PHASES, Settings
from unirl.plan.devices import Device
from unirl.plan.sizes import RunSizes
from unirl.plan.times import step_seconds, step_times

Runs = Sequence[RunSizes]
"""The runs whose settings are chosen together: that of one policy, or those of all tracks of one network."""
Changes = Mapping[str, int]
"""Field of `Settings` to its new value. All other fields stay as the recipe has them."""

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
GATHER = Rung("rollout.gather_weights", "gathers_once", _flag)
DECODE = Rung("pipeline.decode_batch_size", "decode_rows")
COMPILE = Rung("backend.fsdp_cfg.use_torch_compile", "compiled", _flag)
RUNGS = (MICRO, FORWARD, RECOMPUTE, RESIDENT, SHARDS, RESHARD, DEFERRED, GATHER, PASSES, DECODE)
"""The settings that `search` chooses. Compilation is left to the user, since it may fall back without a word."""
ORDER = (DECODE, MICRO, FORWARD, RECOMPUTE, PASSES, RESHARD, DEFERRED, SHARDS, GATHER, RESIDENT)
"""The order in which memory is saved: what costs the least time comes first."""


IDLE: Mapping[str, Sequence[Rung]] = {
    "train": (FORWARD, GATHER, PASSES, DECODE),
    "generate": (MICRO, RECOMPUTE, RESHARD, DEFERRED),
}
"""Settings that change neither the time nor the memory of a phase."""
OF_SHARDS = (RESHARD, DEFERRED, GATHER)
"""Settings without effect where nothing is sharded."""


@dataclass(frozen=True)
class Candidate:
    """Runs with certain settings, and what the cost model says about them."""

    changes: Changes
    seconds: float
    """Seconds of a step, of all runs together."""
    peak_gib: float
    peak_at: str
    """The moment of the peak, one of `MOMENTS`."""


def candidate(runs: Runs, changes: Changes, device: Device) -> Candidate:
    """The runs with some settings changed."""
    peaks = peaks_with(runs, changes)
    at = max(peaks, key=lambda moment: peaks[moment])
    seconds = sum(step_seconds(run.sizes, settings_with(run, changes), device) for run in runs)
    return Candidate(changes, seconds, peaks[at], at)


def settings_with(run: RunSizes, changes: Changes) -> Settings:
    """The settings of a run with some changed. Text is decoded with both branches of guidance in one pass."""
    own = {field: value for field, value in changes.items() if field != PASSES.field or _guides_in_passes(run)}
    return replace(run.settings, **own)  # type: ignore[arg-type]  # flags are 0 and 1


def peaks_with(runs: Runs, changes: Changes) -> dict[str, float]:
    """GiB at each moment of a step, on the devices and in the run that need the most."""
    peaks = [moment_peaks(run, settings_with(run, changes)) for run in runs]
    return {moment: max(each[moment] for each in peaks) for moment in MOMENTS}


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
        return (1, 2) if _guides_in_passes(run) else (now,)
    if rung is DECODE:
        return sorted({1, now}) if run.sizes.decoding.peak_bytes else (now,)
    if rung in OF_SHARDS:
        is_free = num_devices > 1 and (rung is not GATHER or run.sizes.can_sample_sharded)
        return (now, not now) if is_free else (now,)
    if rung is RESIDENT:
        return (now, not now) if run.sizes.encoder_parameters else (now,)
    return (now, not now)


def _guides_in_passes(run: RunSizes) -> bool:
    """True if the branches of guidance may run one after the other. A language model decodes both together."""
    return run.sizes.network_rows > 1 and not run.sizes.network.cache_width


def _powers(largest: int) -> Iterator[int]:
    value = 1
    while value <= largest:
        yield value
        value *= 2


def changes_of(runs: Runs, rung: Rung) -> list[Changes]:
    """The changes of one setting: none, then each value that any of the runs may have and does not have now."""
    values = sorted({value for run in runs for value in values_of(run, rung)})
    now = {vars(run.settings)[rung.field] for run in runs}
    return [{}, *({rung.field: value} for value in values if now != {value})]


@dataclass(frozen=True)
class Fit:
    """The outcome of a search."""

    best: Candidate | None
    """The fastest settings that fit, with the fewest changes among those that are about as fast."""
    smallest: Candidate
    """The settings that need the least memory."""
    next_faster: Candidate | None
    """The settings that would be faster than the best and need the least memory of these, but too much."""


def search(runs: Runs, device: Device, memory_gib: float, free: Sequence[Rung] = RUNGS) -> Fit:
    """Evaluates all settings of runs on devices with so much memory.

    Args:
        free: the settings that may be changed.
    """
    scored = list(_candidates(runs, device, memory_gib, free))
    fitting = [each for each in scored if each.peak_gib <= usable(memory_gib)]
    smallest = min(scored, key=lambda each: (each.peak_gib, len(each.changes), each.seconds))
    if not fitting:
        return Fit(None, smallest, None)
    fastest = min(each.seconds for each in fitting)
    about = [each for each in fitting if each.seconds <= fastest / FASTER]
    best = min(about, key=lambda each: (len(each.changes), each.peak_gib))
    faster = [each for each in scored if each.seconds < FASTER * fastest]
    return Fit(best, smallest, min(faster, key=lambda each: each.peak_gib) if faster else None)


def _candidates(runs: Runs, device: Device, memory_gib: float, free: Sequence[Rung]) -> Iterator[Candidate]:
    """All settings that can be the best, the smallest, or the next faster.

    Micro-batch and chunk have many values, but the one changes training alone and the other sampling alone. So for each
    combination of the other settings, a few values of each are enough.
    """
    axes = [changes_of(runs, rung) for rung in free if rung not in (MICRO, FORWARD)]
    known: dict[tuple[str, frozenset[tuple[str, int]]], Sequence[Changes]] = {}

    def few(rung: Rung, phase: str, changes: Changes) -> Sequence[Changes]:
        # Settings that do not act in this phase are those of the recipe, so that equal searches are done once.
        idle = {other.field for other in IDLE[phase]}
        seen = {field: value for field, value in changes.items() if field not in idle}
        key = phase, frozenset(seen.items())
        if key not in known:
            known[key] = _few_changes(runs, seen, rung, phase, device, memory_gib) if rung in free else [{}]
        return known[key]

    for choice in product(*axes):
        changes = {field: value for each in choice for field, value in each.items()}
        if not _has_effect(runs, changes):
            continue
        for micro, forward in product(few(MICRO, "train", changes), few(FORWARD, "generate", changes)):
            yield candidate(runs, {**changes, **micro, **forward}, device)


def _few_changes(
    runs: Runs, changes: Changes, rung: Rung, phase: str, device: Device, memory_gib: float
) -> Sequence[Changes]:
    """The changes of a setting that acts in one phase alone which are worth combining with others.

    They are none, the one with the smallest peak, and the smallest ones that are about as fast as the fastest: of all,
    and of those that fit.
    """
    options = changes_of(runs, rung)
    peaks, seconds = [], []
    for option in options:
        together = {**changes, **option}
        moments = peaks_with(runs, together)
        peaks.append(max(moments[moment] for moment in STEP_PHASES[phase]))
        times = [step_times(run.sizes, settings_with(run, together), device)[phase] for run in runs]
        seconds.append(sum(time.seconds for time in times))
    numbers = range(len(options))
    few = {0, min(numbers, key=lambda number: peaks[number])}
    for group in (numbers, [number for number in numbers if peaks[number] <= usable(memory_gib)]):
        if group:
            enough = min(seconds[number] for number in group) / FASTER
            few.add(min((n for n in group if seconds[n] <= enough), key=lambda number: peaks[number]))
    return [options[number] for number in sorted(few)]


def _has_effect(runs: Runs, changes: Changes) -> bool:
    """False for changes of sharding where nothing is sharded."""
    is_sharded = any(settings_with(run, changes).num_shards > 1 for run in runs)
    return is_sharded or not any(rung.field in changes for rung in OF_SHARDS)


def words_of(changes: Changes) -> list[str]:
    """The words that make these changes in a recipe of one policy."""
    return [f"{rung.key}={rung.shown(changes[rung.field])}" for rung in (*RUNGS, COMPILE) if rung.field in changes]


@dataclass(frozen=True)
class Gain:
    """A change of one setting, and what the step takes with it."""

    word: str
    seconds: float
    peak_gib: float


def best_changes(runs: Runs, device: Device, memory_gib: float, count: int = 3) -> list[Gain]:
    """The single changes that would make a step the fastest and fit into memory, each evaluated by the model."""
    now = candidate(runs, {}, device)
    gains = []
    for rung in (*RUNGS, COMPILE):
        choices = []
        for change in changes_of(runs, rung)[1:]:
            changed = candidate(runs, change, device)
            if changed.seconds < FASTER * now.seconds and changed.peak_gib <= max(usable(memory_gib), now.peak_gib):
                choices.append(changed)
        if choices:
            # The smallest change with nearly all of the gain.
            fastest = min(each.seconds for each in choices)
            chosen = next(each for each in choices if each.seconds <= 1.02 * fastest)
            [word] = words_of(chosen.changes)
            gains.append(Gain(word, chosen.seconds, chosen.peak_gib))
    return sorted(gains, key=lambda gain: gain.seconds)[:count]


@dataclass(frozen=True)
class Saving:
    """A change of one setting that lowers a peak which is too high."""

    word: str
    gib: float
    moment: str
    """The moment whose peak it lowers the most, of those that do not fit."""


def savings(runs: Runs, memory_gib: float, free: Sequence[Rung] = RUNGS) -> list[Saving]:
    """The single changes that save memory at the moments that do not fit, the largest gain first."""
    now = peaks_with(runs, {})
    too_high = [moment for moment in MOMENTS if now[moment] > usable(memory_gib)]
    result = []
    for rung in free:
        gains = []
        for change in changes_of(runs, rung)[1:]:
            if _has_effect(runs, change):
                peaks = peaks_with(runs, change)
                gains += [(now[moment] - peaks[moment], change, moment) for moment in too_high]
        if gains:
            gib, change, moment = max(gains, key=lambda gain: gain[0])
            if gib >= LEAST_SAVING:
                [word] = words_of(change)
                result.append(Saving(word, gib, moment))
    return sorted(result, key=lambda saving: -saving.gib)


def next_rung(run: RunSizes, phase: str) -> str | None:
    """The first word of the ladder that lowers the peak of a phase of the loop. None at the end of the ladder."""
    moments = STEP_PHASES[phase]
    now = max(moment_peaks(run, run.settings)[moment] for moment in moments)
    for rung in ORDER:
        value = vars(run.settings)[rung.field]
        for lower in _lower(rung, value, values_of(run, rung)):
            change = {rung.field: lower}
            peaks = peaks_with([run], change)
            if max(peaks[moment] for moment in moments) < 0.99 * now:
                return words_of(change)[0]
    return None


def _lower(rung: Rung, now: int, values: Sequence[int]) -> list[int]:
    """The values that need less memory than the present one, the nearest first: of a number of rows, half or less."""
    more_is_less = rung in (RECOMPUTE, SHARDS, PASSES, RESHARD)
    if rung in (MICRO, FORWARD):
        return sorted((v for v in values if v <= now // 2), reverse=True)
    return sorted((v for v in values if (v > now if more_is_less else v < now)), reverse=not more_is_less)


def largest_items(runs: Runs, changes: Changes, moment: str, count: int = 3) -> list[tuple[str, float]]:
    """The largest items at a moment of a step in the run that needs the most memory, each with its GiB."""
    run = max(runs, key=lambda each: peaks_with([each], changes)[moment])
    rows = run.memory_with(settings_with(run, changes))
    items = sorted(((row.name, row.gib[moment]) for _, row in rows), key=lambda item: -item[1])
    return [item for item in items[:count] if item[1] > 0]


def items_text(runs: Runs, changes: Changes, moment: str) -> str:
    """The largest items of a moment, for people."""
    return ", ".join(f"{name} {gib:.2f}" for name, gib in largest_items(runs, changes, moment))


def shortage(run: RunSizes, phase: str) -> str:
    """What the plan says about a phase that ran out of memory: its role, its estimate, and the next setting to turn."""
    phase = "generate" if phase == "eval" else phase
    peaks = moment_peaks(run, run.settings)
    moment = max(STEP_PHASES[phase], key=lambda each: peaks[each])
    word = next_rung(run, phase)
    advice = f"Next on the ladder: {word}" if word else "No setting of this recipe needs less: use more devices"
    return (
        f"phase {phase}, role {ROLES.get(phase, 'train')}: the plan's estimate is {peaks[moment]:.2f} GiB on a device "
        f"({items_text([run], {}, moment)}). {advice}"
    )
