"""Alarms from the metrics of a run: signs that it dies, or that it games its reward.

    step ended -> its row and evaluations join the history -> each sign looks at the history -> alarms begin and end

A sign is a function of the history alone, so a run that was resumed raises the same alarms at the same steps. It
compares the newest steps with the first ones; `unirl.config.watching.WatchConfig` has the thresholds.
"""

from __future__ import annotations

import csv
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.config.errors import AlarmError
from unirl.config.watching import AlarmName, WatchConfig
from unirl.tracking.tables import read_rows

if TYPE_CHECKING:
    from unirl.tracking.tracker import Tracker

REWARD = "rollout/reward_mean"
HELD_OUT, HELD_OUT_ERROR = "eval/reward_mean", "eval/reward_stderr"
EPISODES = "env/return"
SMALL = 1e-9
SURE = 4.56
"""Standard errors that noise exceeds in 5 % of runs of 10,000 independent looks: 20,000 Phi(-4.56) = 0.05."""
LEAST_KL = 0.01
"""A KL divergence below this many nats does not run away, however small it began."""
EXTREME_RATIO = 1000.0
"""An importance ratio that no trust region explains."""


@dataclass(frozen=True)
class MetricSeries:
    """One metric over the steps that have it."""

    name: str
    """With the name of its track, if there are several."""
    steps: list[int]
    values: list[float]

    def first(self, count: int) -> list[float]:
        return self.values[:count]

    def last(self, count: int) -> list[float]:
        return self.values[-count:]


class History:
    """The metrics of all steps, or of all evaluations, of a run until now, metric by metric."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._series: dict[str, MetricSeries] = {}
        self._found: dict[str, list[MetricSeries]] = {}
        """The series that a pattern stands for."""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> None:
        """Append the finite metrics of `row`, which has a `step`."""
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                if name not in self._series:
                    self._series[name] = MetricSeries(name, [], [])
                    self._found = {}
                self._series[name].steps.append(int(row["step"]))
                self._series[name].values.append(value)

    def series(self, metric: str) -> list[MetricSeries]:
        """A metric of every track. `reward/*_mean` stands for all components."""
        if metric not in self._found:
            self._found[metric] = [series for name, series in self._series.items() if _matches(name, metric)]
        return self._found[metric]

    def of_run(self, metric: str) -> MetricSeries | None:
        """A metric of the run as a whole."""
        return self._series.get(metric)


@dataclass
class Course:
    """The course of a run until now."""

    steps: History
    evaluations: History


def _matches(name: str, metric: str) -> bool:
    if "*" in metric:
        start, end = metric.split("*")
        return name.startswith(start) and name.endswith(end)
    return name == metric or name.endswith(f"/{metric}")


@dataclass(frozen=True)
class Finding:
    """What a sign has seen."""

    text: str
    since: int
    """The step at which it began."""
    value: float


@dataclass(frozen=True)
class Sign:
    """A kind of alarm."""

    name: AlarmName
    helps: str
    """What usually helps."""
    look: Callable[[Course, WatchConfig], Finding | None]
    metrics: tuple[str, ...] = ()
    """The metrics of steps that it reads. The history keeps no others."""


# Rules


def _changed(
    course: Course, config: WatchConfig, metric: str, is_bad: Callable[[float, float], bool], words: str
) -> Finding | None:
    """The first track whose metric changed from its first steps to its newest ones as `is_bad` (first, last) says.

    Medians are compared, since one extreme step would move a mean.
    """
    for series in course.steps.series(metric):
        if len(series.values) < config.reference_steps + config.recent_steps:
            continue
        before, now = (statistics.median(part) for part in _ends(series, config))
        if is_bad(before, now):
            since = _since(series, config, lambda value, before=before: is_bad(before, value))  # type: ignore[misc]
            return Finding(f"{words} ({series.name}) went from {before:.4g} to {now:.4g}", since, now)
    return None


def _ends(series: MetricSeries, config: WatchConfig) -> tuple[list[float], list[float]]:
    return series.first(config.reference_steps), series.last(config.recent_steps)


def _since(series: MetricSeries, config: WatchConfig, is_bad: Callable[[float], bool]) -> int:
    """The step from which on every single value is bad; the first of the newest steps if the last value is not."""
    since = series.steps[-config.recent_steps :][0]
    for step, value in zip(reversed(series.steps), reversed(series.values), strict=True):
        if not is_bad(value):
            return since
        since = step
    return since


def held_out_falls(course: Course, config: WatchConfig) -> Finding | None:
    """The held-out reward is below its best while the reward of training is above what it was then."""
    scores, errors = course.evaluations.of_run(HELD_OUT), course.evaluations.of_run(HELD_OUT_ERROR)
    reward = course.steps.of_run(REWARD)
    if scores is None or errors is None or reward is None or len(scores.values) < 3:
        return None
    best = max(range(len(scores.values) - 1), key=scores.values.__getitem__)
    fall = scores.values[best] - scores.values[-1]
    error = math.hypot(errors.values[best], errors.values[-1])
    # An evaluation before the first step is compared with the first step.
    until = max(bisect_right(reward.steps, scores.steps[best]), 1)
    then, newest = reward.values[max(until - config.recent_steps, 0) : until], reward.last(config.recent_steps)
    if fall <= config.standard_errors * error + SMALL or not _rose(then, newest, config):
        return None
    before, now = statistics.fmean(then), statistics.fmean(newest)
    return Finding(
        f"the held-out reward fell from {scores.values[best]:.4g} to {scores.values[-1]:.4g} since step "
        f"{scores.steps[best]}, while the reward of training rose from {before:.4g} to {now:.4g}",
        scores.steps[best],
        fall,
    )


def component_falls(course: Course, config: WatchConfig) -> Finding | None:
    """A component lost much of its first value while the whole reward rose."""
    least = config.reference_steps + config.recent_steps
    reward = course.steps.of_run(REWARD)
    if reward is None or len(reward.values) < least or not _rose(*_ends(reward, config), config):
        return None
    for series in course.steps.series("reward/*_mean"):
        if len(series.values) < least:
            continue
        first, last = _ends(series, config)
        before, now = statistics.fmean(first), statistics.fmean(last)
        if _rose(last, first, config) and before - now > config.component_drop * abs(before):
            return Finding(
                f"{series.name} fell from {before:.4g} to {now:.4g}, while the whole reward rose",
                series.steps[config.reference_steps - 1],
                now,
            )
    return None


def _rose(before: Sequence[float], now: Sequence[float], config: WatchConfig) -> bool:
    """The mean of the newer values is higher by more than the standard errors of both means."""
    noise = max(_deviation(before), _deviation(now))
    error = noise * math.sqrt(1 / len(before) + 1 / len(now))
    return statistics.fmean(now) - statistics.fmean(before) > config.standard_errors * error + SMALL


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def diversity_collapses(course: Course, config: WatchConfig) -> Finding | None:
    """The samples resemble each other far more than the first ones did."""

    def is_bad(before: float, now: float) -> bool:
        return now < config.diversity_ratio * before

    return _of_samples(course, "diversity", is_bad, "the diversity of samples")


def detail_grows(course: Course, config: WatchConfig) -> Finding | None:
    """The images have far more energy at the finest scale than the first ones had."""

    def is_bad(before: float, now: float) -> bool:
        return now > config.detail_ratio * before + SMALL

    return _of_samples(course, "fine_detail", is_bad, "the energy of the finest detail of images")


def _of_samples(course: Course, measure: str, is_bad: Callable[[float, float], bool], words: str) -> Finding | None:
    """Compares the samples of the newest evaluation with those of the first one, which have equal prompts and noise.

    Episodes are left out, since those of a good policy look alike.
    """
    if course.steps.of_run(EPISODES) is not None:
        return None
    series = course.evaluations.of_run(f"eval/{measure}")
    if series is None or not is_bad(before := series.values[0], now := series.values[-1]):
        return None
    since = next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(before, value))
    first = series.steps[0]
    text = f"{words} ({series.name}) went from {before:.4g} in the evaluation after step {first} to {now:.4g}"
    return Finding(text, since, now)


def length_drifts(course: Course, config: WatchConfig) -> Finding | None:
    """Responses became longer or shorter, by more than the noise of all steps until now explains."""

    def is_bad(before: float, now: float) -> bool:
        return now > config.length_ratio * before or now < before / config.length_ratio

    for series in course.steps.series("rollout/response_len_mean"):
        if len(series.values) < config.reference_steps + config.recent_steps:
            continue
        first, last = _ends(series, config)
        before, now = statistics.fmean(first), statistics.fmean(last)
        if not is_bad(before, now):
            continue
        error = _step_noise(series.values) * math.sqrt(1 / len(first) + 1 / len(last))
        if abs(now - before) > SURE * error:
            since = _since(series, config, lambda value, before=before: is_bad(before, value))  # type: ignore[misc]
            return Finding(
                f"the mean length of responses ({series.name}) went from {before:.4g} to {now:.4g}", since, now
            )
    return None


def _step_noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise of single steps, from the differences of neighbours, which a slow drift leaves.

    For independent normal values, the mean absolute difference is 2 / sqrt(pi) standard deviations.
    """
    return statistics.fmean(abs(b - a) for a, b in pairwise(values)) * math.sqrt(math.pi) / 2


def kl_runs_away(course: Course, config: WatchConfig) -> Finding | None:
    """The KL divergence of an update, or from the reference, is many times that of the first steps."""

    def is_bad(before: float, now: float) -> bool:
        return now > config.kl_ratio * max(abs(before), LEAST_KL)

    for metric in ("train/approx_kl", "train/kl_old"):
        found = _changed(course, config, metric, is_bad, "the KL divergence of an update")
        if found is not None:
            return found
    return None


def ratio_runs_away(course: Course, config: WatchConfig) -> Finding | None:
    """Nearly all elements leave the trust region, or single importance ratios are extreme step after step."""
    for metric, bound, words in (
        ("train/clip_fraction", config.clip_fraction, "the share of elements outside the trust region"),
        ("train/ratio_max", EXTREME_RATIO, "the largest importance ratio"),
    ):
        for series in course.steps.series(metric):
            last = series.last(config.recent_steps)
            if len(last) == config.recent_steps and min(last) > bound:
                since = _since(series, config, lambda value, bound=bound: value > bound)  # type: ignore[misc]
                return Finding(f"{words} ({series.name}) is {last[-1]:.4g}", since, last[-1])
    return None


def groups_are_equal(course: Course, config: WatchConfig) -> Finding | None:
    """For many steps nearly all groups have equal rewards, which they had not at first, as groups of one sample do."""
    for series in course.steps.series("rollout/zero_std_group_ratio"):
        first, last = series.first(config.reference_steps), series.last(config.patience)
        if len(last) == config.patience and statistics.median(first) < config.equal_groups <= min(last):
            since = _since(series, config, lambda value: value >= config.equal_groups)
            return Finding(f"{last[-1]:.0%} of the groups have equal rewards ({series.name})", since, last[-1])
    return None


def reward_is_saturated(course: Course, config: WatchConfig) -> Finding | None:
    """For many steps rewards have next to no spread, and their mean is the largest reward."""
    spreads = {series.name: series for series in course.steps.series("rollout/reward_std")}
    for series in course.steps.series("rollout/reward_max"):
        spread = spreads.get(series.name.replace("reward_max", "reward_std"))
        if spread is None or len(spread.values) < config.reference_steps + config.patience:
            continue
        before = statistics.fmean(spread.first(config.reference_steps))
        if before > 0 and max(spread.last(config.patience)) < 0.01 * before:
            since = spread.steps[-config.patience]
            top = series.values[-1]
            return Finding(f"all rewards are near the largest one, {top:.4g} ({spread.name})", since, top)
    return None


def entropy_collapses(course: Course, config: WatchConfig) -> Finding | None:
    """The entropy of the policy is a small share of that of the first steps."""

    def is_bad(before: float, now: float) -> bool:
        return before > 0 and now < config.entropy_ratio * before

    return _changed(course, config, "train/entropy", is_bad, "the entropy of the policy")


SIGNS: tuple[Sign, ...] = (
    Sign(
        "heldout.falls",
        "stop at the best evaluation (keep_checkpoints, checkpoint.keep_every), strengthen the KL term, or mend the "
        "reward",
        held_out_falls,
        (REWARD,),
    ),
    Sign(
        "component.falls",
        "raise the weight of this component, or lower that of the one that rises",
        component_falls,
        (REWARD, "reward/*_mean"),
    ),
    Sign(
        "diversity.collapse",
        "look at the samples; strengthen the KL term, lower the learning rate, or take more prompts",
        diversity_collapses,
        (EPISODES,),
    ),
    Sign(
        "detail.grows",
        "look at the samples for grain or grids; add a reward for quality, or strengthen the KL term",
        detail_grows,
        (EPISODES,),
    ),
    Sign(
        "length.drift",
        "look at the responses; a reward that counts words is gamed by length, and its mean per token is not",
        length_drifts,
        ("rollout/response_len_mean",),
    ),
    Sign(
        "kl.runaway",
        "lower the learning rate or the clip range, or make fewer updates per batch",
        kl_runs_away,
        ("train/approx_kl", "train/kl_old"),
    ),
    Sign(
        "ratio.runaway",
        "lower the learning rate, or make fewer updates per batch",
        ratio_runs_away,
        ("train/clip_fraction", "train/ratio_max"),
    ),
    Sign(
        "groups.equal",
        "take harder or easier prompts, more samples per prompt, or `refill`",
        groups_are_equal,
        ("rollout/zero_std_group_ratio",),
    ),
    Sign(
        "reward.saturated",
        "the task is solved, or the reward cannot tell good from better: take harder prompts or a finer reward",
        reward_is_saturated,
        ("rollout/reward_std", "rollout/reward_max"),
    ),
    Sign(
        "entropy.collapse",
        "raise algorithm.entropy_coef or the temperature, or lower the learning rate",
        entropy_collapses,
        ("train/entropy",),
    ),
)


class Watchdog:
    """Looks at the metrics of each step of one run."""

    def __init__(self, config: WatchConfig, tracker: Tracker) -> None:
        self._config, self._tracker = config, tracker
        self._signs = [] if "all" in config.ignore else [sign for sign in SIGNS if sign.name not in config.ignore]
        self._kept = {metric for sign in self._signs for metric in sign.metrics}
        self._course: Course | None = None
        self._raised: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float]) -> AlarmError | None:
        """Raise and end alarms after a step, with its evaluation if there was one.

        Args:
            metrics: those of the step, which are in the files of the run.

        Returns:
            The error that ends the run if an alarm began, unless `watch.on_alarm` is `log`.
        """
        if not self._signs:
            return None
        if self._course is None:
            self._course = self._read(step)
        self._add(self._course, {"step": step, **metrics}, self._tracker.newest_evaluation)
        error = None
        for sign in self._signs:
            found = sign.look(self._course, self._config)
            if found is None and sign.name in self._raised:
                self._raised.remove(sign.name)
                self._tracker.event("alarm.clear", alarm=sign.name, step=step)
            elif found is not None and sign.name not in self._raised:
                self._raised.add(sign.name)
                error = self._begin(sign, found, step) or error
        return error

    def _begin(self, sign: Sign, found: Finding, step: int) -> AlarmError | None:
        seen = f"{found.text}, beyond its bound since step {found.since}"
        text = f"alarm {sign.name} after step {step}: {seen}. What helps: {sign.helps}"
        self._tracker.event("alarm.raise", alarm=sign.name, value=found.value, step=step, text=text)
        if self._config.on_alarm == "log":
            if self._tracker.console:  # the event is written already
                self._tracker.console.warn(text)
            return None
        return AlarmError(
            f"{text}.\nThe run ends here because of watch.on_alarm={self._config.on_alarm}. To train without this "
            f"alarm, set watch.ignore=[{sign.name}]; to be told and go on, watch.on_alarm=log"
        )

    def _read(self, step: int) -> Course:
        """The course before `step` from the files of the run. The signs that it has are no new alarms."""
        run = self._tracker.run
        course = Course(History(), History())
        evaluations = {int(row["step"]): row for row in evaluations_in(run.root)}
        if 0 in evaluations:
            course.evaluations.add(evaluations[0])
        for row in read_rows(run.metrics):
            if row["step"] < step:
                self._add(course, row, evaluations.get(row["step"], {}))
        self._raised = {sign.name for sign in self._signs if sign.look(course, self._config) is not None}
        for name in sorted(self._raised):
            self._tracker.warn(
                f"alarm {name} was raised before this run was continued and lasts; it is not raised again"
            )
        return course

    def _add(self, course: Course, row: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        course.steps.add(
            {name: float(value) for name, value in row.items() if name == "step" or self._is_watched(name)}
        )
        if evaluated.get("step") == row["step"]:
            course.evaluations.add(evaluated)

    def _is_watched(self, name: str) -> bool:
        return any(_matches(name, metric) for metric in self._kept)


def evaluations_in(root: Path) -> list[dict[str, float]]:
    """The rows of eval_metrics.csv of a run. Empty if it has not evaluated."""
    path = root / "eval_metrics.csv"
    if not path.exists():
        return []
    with open(path, encoding="ascii", newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
