"""What the pages about runs show: the list, one run with its curves, its settings, and a comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from unirl.tracking.catalog import overview_of, total_steps
from unirl.tracking.comparison import (
    cost_of,
    last_evaluation,
    notes_on,
    outcome_of,
    progress_of,
    setting_differences,
)
from unirl.tracking.metrics import meaning_of
from unirl.tracking.paired import LEVEL
from unirl.tracking.record import RunRecord
from unirl.tracking.run_directory import REMARKS
from unirl.tracking.sample_index import IndexedSample
from unirl.viewer.library import OpenRun, RunLibrary
from unirl.viewer.samples import MAX_PAGE, common_prompts, tile

ALARMS = ("alarm.raise", "alarm.clear", "warning", "run.restart", "run.resume", "reward.error", "group.drop",
          "mirror.failed", "ckpt.commit", "run.start", "run.end")  # fmt: skip
MAX_ALARMS = 200
ALARM_BYTES = 2**18
"""Bytes at the end of the events of each run that the list of runs searches for alarms."""
MAX_NAMES = 64
"""Metrics that one request can ask for."""
MAX_COMPARED = 8


class BadRequest(ValueError):
    """A request that the viewer cannot answer."""


@dataclass(frozen=True)
class CurvesRequest:
    """The metrics that are asked for."""

    names: str = ""
    """Names, separated by commas."""


@dataclass(frozen=True)
class ComparisonRequest:
    """The runs that are compared with the first one."""

    runs: str
    """Ids, separated by commas."""
    offset: int = 0
    limit: int = 12


def runs(library: RunLibrary) -> dict[str, object]:
    """All runs, newest first. The newest is read already, since its page is the likeliest to follow."""
    rows = [_listed(id, root) for id, root in library.roots().items()]
    rows.sort(key=lambda row: str(row["created"]), reverse=True)
    if rows:
        library.read_ahead(str(rows[0]["id"]))
    return {"folders": [str(folder) for folder in library.folders], "remarks": REMARKS, "runs": rows}


def _listed(id: str, root: Path) -> dict[str, object]:
    record = RunRecord(root)
    return asdict(overview_of(record)) | {"id": id, "name": root.resolve().name, "alarms": _alarms(record)}


def run_page(library: RunLibrary, id: str) -> dict[str, object]:
    """The facts about a run, without its curves."""
    run = library.open(id)
    with run.reading() as record:
        metrics, events, facts = record.metrics, record.events, record.facts
        return {
            **_head(run, record),
            "facts": facts,
            "remark": "" if facts is None else facts.remark,
            "names": {name: _meaning(name) for name in metrics.names()},
            "evaluation_names": sorted({name for row in record.evaluations for name in row} - {"step"}),
            "evaluated": record.evaluated,
            "sampled": record.sampled,
            "cost": _cost(record),
            "ledger": record.ledger,
            "events": [_event(event) for event in events.named(*ALARMS)[-MAX_ALARMS:]],
            "event_counts": dict(sorted(events.counts.items())),
            "environment": record.environment,
            "problems": record.problems,
        }


def state(library: RunLibrary, id: str) -> dict[str, object]:
    """The present name, state and steps of a run, for the top of every page."""
    run = library.open(id)
    with run.reading() as record:
        return _head(run, record)


def outcome(library: RunLibrary, id: str) -> dict[str, object]:
    """The first evaluation of a run beside its last one, paired over prompts."""
    run = library.open(id)
    with run.reading(tables=False) as record:
        return {"outcome": progress_of(record), "level": LEVEL, "problems": record.problems}


def curves(library: RunLibrary, id: str, request: CurvesRequest) -> dict[str, object]:
    """Columns of metrics over the steps, and those of the evaluations."""
    names = [name for name in request.names.split(",") if name]
    if len(names) > MAX_NAMES:
        raise BadRequest(f"at most {MAX_NAMES} metrics can be asked for at once, got {len(names)}")
    run = library.open(id)
    with run.reading() as record:
        metrics, evaluations = record.metrics, record.evaluations
        measured = {name for row in evaluations for name in row}
        return {
            **_head(run, record),
            "steps": [row["step"] for row in metrics.rows],
            "samples": [done.samples for done in metrics.progress],
            "seconds": [done.seconds for done in metrics.progress],
            "columns": {name: [row.get(name) for row in metrics.rows] for name in names},
            "evaluation_steps": [row["step"] for row in evaluations],
            "evaluations": {name: [row.get(name) for row in evaluations] for name in names if name in measured},
        }


def settings(library: RunLibrary, id: str) -> dict[str, object]:
    """Every setting with its origin, and the recipe as it was written."""
    run = library.open(id)
    with run.reading(tables=False) as record:
        name = "config/recipe.yaml"
        recipe = record.files.data(name) or b""
        return {
            "settings": [
                {"key": each.key, "shown": each.shown, "source": each.source, "place": each.place}
                for each in record.settings
            ],
            "recipe": recipe.decode("utf-8", "replace"),
            "chosen": {} if record.facts is None else record.facts.chosen,
            "problems": record.problems,
        }


def comparison(library: RunLibrary, request: ComparisonRequest) -> dict[str, object]:
    """Runs compared with the first one: settings, held-out scores with intervals, cost."""
    with ExitStack() as opened:
        compared, records = _opened(library, request.runs, opened)
        lasts = [last_evaluation(record) for record in records]
        differences = setting_differences(records)
        return {
            "runs": [_head(*pair) | {"cost": _cost(pair[1])} for pair in zip(compared, records, strict=True)],
            "differences": differences,
            "notes": notes_on(records, differences),
            "progress": [progress_of(record) for record in records],
            "outcomes": [
                None if lasts[0] is None or last is None else outcome_of(lasts[0], last) for last in lasts[1:]
            ],
            "level": LEVEL,
            "problems": [problem for record in records for problem in record.problems],
        }


def compared_samples(library: RunLibrary, request: ComparisonRequest) -> dict[str, object]:
    """The prompts that the last evaluations of all runs have, with the samples of each run."""
    with ExitStack() as opened:
        _, records = _opened(library, request.runs, opened)
        lasts = [last_evaluation(record) for record in records]
        evaluations = [last for last in lasts if last is not None]
        groups = common_prompts(evaluations) if len(evaluations) == len(lasts) else []
        start = max(request.offset, 0)
        part = groups[start : start + min(max(request.limit, 0), MAX_PAGE)]
        return {
            "total": len(groups),
            "offset": start,
            "rows": [
                {
                    "prompt": of_runs[0].prompt or of_runs[0].group_id,
                    "rewards": [group.mean_reward for group in of_runs],
                    "samples": [
                        [tile(record, IndexedSample("eval", last.step, n, last.rows[n])) for n in group.rows[:4]]
                        for record, last, group in zip(records, evaluations, of_runs, strict=True)
                    ],
                }
                for of_runs in part
            ],
        }


def _opened(library: RunLibrary, ids: str, opened: ExitStack) -> tuple[list[OpenRun], list[RunRecord]]:
    """The runs of ids, each held until `opened` is closed."""
    wanted = list(dict.fromkeys(id for id in ids.split(",") if id))
    if not 1 <= len(wanted) <= MAX_COMPARED:
        raise BadRequest(f"1 to {MAX_COMPARED} runs can be compared, got {len(wanted)}")
    compared = [library.open(id) for id in wanted]
    # Each thread takes the locks in one order, so two comparisons never wait for each other.
    records = {run.id: opened.enter_context(run.reading()) for run in sorted(compared, key=lambda run: run.id)}
    return compared, [records[run.id] for run in compared]


def _head(run: OpenRun, record: RunRecord) -> dict[str, object]:
    """The name, the state and the steps of a run."""
    facts, metrics = record.facts, record.metrics
    return {
        "id": run.id,
        "name": run.root.resolve().name,
        "path": str(run.root),
        "recipe": "" if facts is None else facts.recipe,
        "scale": "" if facts is None else facts.scale,
        "status": record.status,
        "count": metrics.count,
        "step": metrics.last.get("step"),
        "total_steps": total_steps(record),
        "complete": run.tables_are_complete,
    }


def _cost(record: RunRecord) -> dict[str, object]:
    cost = cost_of(record)
    return asdict(cost) | {"total_s": cost.total_s, "samples_per_s": cost.samples_per_s}


def _meaning(name: str) -> str:
    """The meaning of a metric, whose name may begin with that of a track."""
    return meaning_of(name) or meaning_of(name.partition("/")[2])


def _event(event: Mapping[str, object]) -> dict[str, object]:
    """When and what an event was. Its text comes first, and its other fields follow in words."""
    rest = {key: value for key, value in event.items() if key not in ("t", "v", "ev", "text") and value != ""}
    words = ", ".join(_in_words(key, value) for key, value in rest.items())
    text = str(event.get("text", ""))
    return {
        "time": str(event.get("t", "")),
        "name": str(event.get("ev", "")),
        "step": event.get("step"),
        "text": f"{text} ({words})" if text and words else text or words,
    }


def _in_words(key: str, value: object) -> str:
    """A field of an event: the name of an alarm as it is, and a number with at most four digits."""
    if key == "alarm":
        return str(value)
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{key.replace('_', ' ')} {shown}"


def _alarms(record: RunRecord) -> int:
    """The number of alarms that the newest ALARM_BYTES of the events raise."""
    file = record.files.open("events.jsonl")
    if file is None:
        return 0
    with file:
        file.seek(max(file.seek(0, os.SEEK_END) - ALARM_BYTES, 0))
        return file.read(ALARM_BYTES).count(b'"alarm.raise"')
