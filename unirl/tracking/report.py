"""`report.html` of a run: one file without scripts that shows what the run recorded, to read and print anywhere.

Every text comes from files that somebody else may have written. The template escapes all of them, invisible characters
are spelled out, and what looks like a secret is masked. A policy in the page forbids scripts and every connection.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile

import unirl
from unirl.tracking.charts import Chart, chart
from unirl.tracking.comparison import BETWEEN_STEPS, Cost, PairedOutcome, cost_of, progress_of
from unirl.tracking.console import accuracies, duration
from unirl.tracking.curve import Series, held_out_curve, training_curve
from unirl.tracking.metrics import meaning_of
from unirl.tracking.paired import LEVEL
from unirl.tracking.record import RunRecord, Setting
from unirl.tracking.report_samples import (
    EmbeddedImages,
    ShownPrompt,
    ShownSample,
    before_and_after,
    extremes,
    files_of,
    one_side,
)
from unirl.tracking.step_tables import Ledger
from unirl.tracking.streams import inert
from unirl.types.secrets import redact, without_values

DEFAULT_MB = 20
"""Largest size of a report in megabytes of 10^6 bytes."""
RESERVE = 65_536
"""Bytes that are kept free for what frames the images."""
CURVES = (
    "train/ratio_mean", "train/clip_fraction", "train/kl", "train/approx_kl", "train/entropy", "train/policy_entropy",
    "train/grad_norm", "train/loss", "rollout/zero_std_group_ratio", "rollout/response_len_mean",
    "rollout/truncated_fraction", "env/return", "env/success_once", "env/length", "train/explained_variance",
    "train/preference_accuracy", "train/q_mean", "train/alpha", "time/step",
)  # fmt: skip
"""Metrics that have a curve if the run has them, with or without the name of a track before them."""
MAX_CURVES = 40
MAX_EVENTS = 50
"""Newest warnings and other events that are listed."""
SHOWN_EVENTS = (
    "warning", "alarm.raise", "run.restart", "run.resume", "reward.error", "group.drop", "mirror.failed",
)  # fmt: skip


class ReportTooLarge(ValueError):
    """A report does not fit into the size that was asked for."""


@dataclass(frozen=True)
class PhaseShare:
    """Seconds of a phase, and its share of the time of the run."""

    name: str
    seconds: float
    share: float
    start: float
    """Share of the phases before it."""


@dataclass(frozen=True)
class ReportPage:
    """What the template shows."""

    run: RunRecord
    made: str
    outcome: PairedOutcome | None
    accuracies: list[tuple[str, float, float]]
    """Shares of right answers in the first and the last evaluation, by metric."""
    reward: Chart | None
    components: list[Chart]
    curves: list[Chart]
    constants: list[tuple[str, float]]
    """Metrics of CURVES whose values are all equal."""
    prompts: list[ShownPrompt]
    num_prompts: int
    """Number of prompts of which `prompts` are a part."""
    steps: tuple[int, ...]
    """The evaluations of `prompts`: two, or one."""
    best: list[ShownSample]
    worst: list[ShownSample]
    sample_step: int | None
    """The training step of `best` and `worst`."""
    cost: Cost
    phases: list[PhaseShare]
    events: list[tuple[str, str, str]]
    """Time, name and text of events."""
    event_counts: list[tuple[str, int]]
    ledger: Ledger
    settings: tuple[Setting, ...]
    environment: Mapping[str, Mapping[str, str]]
    commands: list[str]
    recipe_text: str


def write_report(run: RunRecord, path: Path, max_bytes: int) -> EmbeddedImages:
    """Writes the report of a run; returns its images, some of which may have been reduced or left out to fit.

    Raises:
        ReportTooLarge: the page exceeds `max_bytes` without any image.
        OSError: the file cannot be written.
    """
    page = report_page(run)
    shown = list(files_of(page.prompts, [*page.best, *page.worst]))
    bare = len(render(page, EmbeddedImages(run, (), 0)).encode())
    if bare + RESERVE > max_bytes:
        raise ReportTooLarge(f"the page has {bare} bytes without any image, and {RESERVE} are kept free")
    images = EmbeddedImages.within(run, shown, max_bytes - bare - RESERVE)
    _replace(path, render(page, images))
    return images


def report_page(run: RunRecord) -> ReportPage:
    """Everything that the report of a run shows, without the images."""
    cost = cost_of(run)
    prompts, num_prompts, steps = _prompts(run)
    sample_step = run.sampled[-1] if run.sampled else None
    best, worst = extremes(run.samples(sample_step)) if sample_step is not None else ([], [])
    curves, constants = _curves(run)
    events = run.events
    return ReportPage(
        run=run,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, UniRL {unirl.__version__}",
        outcome=progress_of(run),
        accuracies=_accuracies(run),
        reward=reward_chart(run),
        components=_component_charts(run),
        curves=curves,
        constants=constants,
        prompts=prompts,
        num_prompts=num_prompts,
        steps=steps,
        best=best,
        worst=worst,
        sample_step=sample_step,
        cost=cost,
        phases=_phases(cost),
        events=[_event(event) for event in events.named(*SHOWN_EVENTS)[-MAX_EVENTS:]],
        event_counts=[(name, count) for name, count in sorted(events.counts.items()) if name in SHOWN_EVENTS],
        ledger=run.ledger,
        settings=run.settings,
        environment=run.environment,
        commands=_commands(run),
        recipe_text=(run.files.data("config/recipe.yaml") or b"").decode("utf-8", "replace"),
    )


def render(page: ReportPage, images: EmbeddedImages) -> str:
    """The page as HTML. Every value is escaped, is shown without control characters, and has its secrets masked."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else redact(inert(str(value)))

    environment = Environment(
        autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["duration"] = duration
    template = (files("unirl.tracking") / "report.html.jinja").read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        page=page,
        run=page.run,
        facts=page.run.facts,
        status=page.run.status,
        image=lambda sample: Markup(images(sample)),  # base64 that was made here
        images=images,
        level=f"{LEVEL:.0%}",
        problems=page.run.problems,
    )
    return without_values(text)


def reward_chart(run: RunRecord) -> Chart | None:
    """The reward of training and of the held-out prompts over the steps. None if the run has neither."""
    curves = (training_curve(run.metrics.rows), held_out_curve(run.evaluations))
    return chart("Reward", "", [curve for curve in curves if curve is not None], 720, 300)


def _component_charts(run: RunRecord) -> list[Chart]:
    """A chart for each component of the reward, in training and on held-out prompts."""
    charts = []
    for name in run.metrics.names():
        component = name.removeprefix("reward/").removesuffix("_mean")
        if not name.startswith("reward/") or not name.endswith("_mean"):
            continue
        held_out = [(row["step"], row[key]) for row in run.evaluations if (key := f"eval/{component}_mean") in row]
        series = [_series("training", run.metrics.curve(name)), _series("held out", held_out)]
        charts.append(chart(component, "component of the reward", [one for one in series if one.values]))
    return [each for each in charts if each is not None][:MAX_CURVES]


def _curves(run: RunRecord) -> tuple[list[Chart], list[tuple[str, float]]]:
    """The charts of CURVES, and those metrics among them whose values are all equal."""
    charts, constants = [], []
    names = run.metrics.names()
    for wanted in CURVES:
        for name in names:
            if name != wanted and not name.endswith(f"/{wanted}"):
                continue
            points = run.metrics.curve(name)
            if len({value for _, value in points}) == 1:
                constants.append((name, points[0][1]))
            else:
                charts.append(chart(name, meaning_of(wanted), [_series(name, points)]))
    return [each for each in charts if each is not None][:MAX_CURVES], constants


def _series(label: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(label, [step for step, _ in points], [value for _, value in points])


def _prompts(run: RunRecord) -> tuple[list[ShownPrompt], int, tuple[int, ...]]:
    """The prompts that are shown, of how many, and the steps of their evaluations."""
    if not run.evaluated:
        return [], 0, ()
    first, last = run.evaluated[0], run.evaluated[-1]
    after = run.evaluation(last)
    if first != last:
        pairs, count = before_and_after(run.evaluation(first), after)
        if pairs:
            return pairs, count, (first, last)
    return one_side(after), len({row.group_id for row in after.rows}), (last,)


def _accuracies(run: RunRecord) -> list[tuple[str, float, float]]:
    """The shares of right answers that the first and the last evaluation have."""
    first, last = (run.evaluations[0], run.evaluations[-1]) if len(run.evaluations) > 1 else ({}, {})
    names = accuracies([name for name in first if name in last])
    return [(name.removeprefix("eval/"), first[name], last[name]) for name in names]


def _phases(cost: Cost) -> list[PhaseShare]:
    """The phases of the run, longest first; what a step does beside them is `other`."""
    inside = sum(seconds for name, seconds in cost.phases.items() if name not in BETWEEN_STEPS)
    seconds = {**cost.phases, "other": max(cost.step_s - inside, 0.0)}
    total = sum(seconds.values())
    phases: list[PhaseShare] = []
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        if value > 0:
            phases.append(PhaseShare(name, value, value / total, sum(each.share for each in phases)))
    return phases


def _event(event: dict[str, object]) -> tuple[str, str, str]:
    rest = {key: value for key, value in event.items() if key not in ("t", "v", "ev")}
    text = rest.pop("text", None)
    words = [str(text)] if text is not None else [f"{key}={value}" for key, value in rest.items()]
    return str(event.get("t", "")), str(event.get("ev", "")), ", ".join(words)


def _commands(run: RunRecord) -> list[str]:
    """The commands that give the code and repeat the run, in a folder of its own."""
    if run.facts is None:
        return []
    commands = [] if run.facts.git is None else [f"git checkout {shlex.quote(run.facts.git.commit)}"]
    started = Counter(
        shlex.join(("unirl", *_elsewhere(session.argv))) for session in run.facts.sessions if session.argv
    )
    return [*commands, *list(started)[:1]]


def _elsewhere(words: Sequence[str]) -> list[str]:
    """The words of a command without the folder of its run, in which the run would go on instead of starting anew."""
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in ("--resume", "--name", "--out"):
            kept.pop()
        elif not word.startswith(("run.dir=", "run.name=", "resume=", "--resume=", "--name=", "--out=")):
            kept.append(word)
    return kept


def _replace(path: Path, text: str) -> None:
    """Writes the file through a temporary one of a fresh name: links that lie in the folder are not followed."""
    with NamedTemporaryFile("w", dir=path.parent, prefix=".report-", delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    """The permissions that new files of this process lack."""
    current = os.umask(0o077)
    os.umask(current)
    return current
