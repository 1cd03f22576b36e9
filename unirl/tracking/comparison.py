"""Compares runs: their settings, their outcome on held-out prompts, and their cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unirl.tracking.paired import PairedDifference, paired_differences, scores_by_prompt
from unirl.tracking.record import RunRecord, StoredSamples

UNSET = "(absent)"
PLACES = ("run.", "tracking.")
"""Settings that say where a run is and who watches it. They cannot change what it learns."""


@dataclass(frozen=True)
class SettingDifference:
    """A setting whose value is not the same in all runs."""

    key: str
    values: tuple[object, ...]
    """One per run; UNSET if the run has no such setting."""
    shown: tuple[str, ...]
    """The values as in YAML."""
    sources: tuple[str, ...]
    """The source of the value in each run, as in `Setting.source`; empty if the run has no such setting."""

    @property
    def is_absent_default(self) -> bool:
        """Returns True if nobody set the key, and some of the runs lack the part that has it."""
        return "" in self.sources and set(self.sources) <= {"", "default"}


@dataclass(frozen=True)
class PairedOutcome:
    """Two evaluations, paired over their common prompts."""

    steps: tuple[int, int]
    prompts: tuple[int, int]
    """Number of prompts of each evaluation."""
    samples: tuple[int, int]
    differences: tuple[PairedDifference, ...]

    @property
    def common(self) -> int:
        """Number of prompts that both scored."""
        return max((each.num_prompts for each in self.differences), default=0)


@dataclass(frozen=True)
class Cost:
    """The cost of a run."""

    steps: int
    samples: int
    """Samples that were generated for training."""
    step_s: float
    """Seconds of all steps. Evaluations and checkpoints are not part of a step."""
    phases: dict[str, float]
    """Seconds of all steps by phase, such as `generate`; `eval` and `checkpoint` lie between steps."""
    host_gib: float | None
    device_gib: float | None

    @property
    def total_s(self) -> float:
        """Seconds of steps, evaluations and checkpoints; without the start of the process."""
        return self.step_s + sum(self.phases.get(name, 0.0) for name in BETWEEN_STEPS)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of steps. None without a step."""
        return self.samples / self.step_s if self.step_s > 0 else None


BETWEEN_STEPS = ("eval", "checkpoint")
"""Phases that are not part of `time/step`."""


def setting_differences(runs: Sequence[RunRecord]) -> list[SettingDifference]:
    """The settings that differ, without those of PLACES, in the order of the first run that has them."""
    tables = [{setting.key: setting for setting in run.settings} for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = []
    for key in keys:
        values = tuple(table[key].value if key in table else UNSET for table in tables)
        if not key.startswith(PLACES) and any(not _same(value, values[0]) for value in values):
            sources = tuple(table[key].source if key in table else "" for table in tables)
            shown = tuple(table[key].shown if key in table else UNSET for table in tables)
            found.append(SettingDifference(key, values, shown, sources))
    return found


def progress_of(run: RunRecord) -> PairedOutcome | None:
    """The first evaluation of a run beside its last. None unless two are stored."""
    if len(run.evaluated) < 2:
        return None
    return outcome_of(run.evaluation(run.evaluated[0]), run.evaluation(run.evaluated[-1]))


def last_evaluation(run: RunRecord) -> StoredSamples | None:
    """The newest stored evaluation of a run. None if it has none."""
    return run.evaluation(run.evaluated[-1]) if run.evaluated else None


def outcome_of(before: StoredSamples, after: StoredSamples) -> PairedOutcome:
    """Two evaluations paired over their common prompts."""
    first, second = scores_by_prompt(before.rows), scores_by_prompt(after.rows)
    return PairedOutcome(
        (before.step, after.step),
        (len(first), len(second)),
        (len(before.rows), len(after.rows)),
        tuple(paired_differences(first, second)),
    )


def cost_of(run: RunRecord) -> Cost:
    """The cost of a run, by its metrics."""
    metrics = run.metrics
    times = {
        name.removeprefix("time/"): seconds for name, seconds in metrics.totals.items() if name.startswith("time/")
    }
    return Cost(
        steps=metrics.count,
        samples=round(_finite(metrics.totals.get("samples/generated", 0.0))),
        step_s=_finite(times.pop("step", 0.0)),
        phases={name: _finite(seconds) for name, seconds in times.items()},
        host_gib=metrics.peaks.get("mem/host_peak_gib"),
        device_gib=metrics.peaks.get("mem/device_peak_gib"),
    )


def notes_on(runs: Sequence[RunRecord], differences: Iterable[SettingDifference]) -> list[str]:
    """Remarks that a reader of a comparison needs before the figures."""
    notes = []
    if any(each.key.startswith("reward.") for each in differences):
        notes.append("the settings of the reward differ, so rewards of one name may not mean the same")
    if len({run.facts.scale for run in runs if run.facts is not None}) > 1:
        notes.append("the runs have different scales: values of toy runs mean nothing")
    return notes


def _finite(value: float) -> float:
    """A sum of times or counts. One damaged entry makes it 0."""
    return value if math.isfinite(value) else 0.0


def _same(a: object, b: object) -> bool:
    """Equality that tells 1 from True, and to which two `nan` are equal."""
    return repr(a) == repr(b)
