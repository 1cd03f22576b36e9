"""`unirl compare RUN RUN ...`: differences of settings, of the outcome on held-out prompts, and of the cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from string import ascii_uppercase

from unirl.cli.arguments import Parser
from unirl.cli.runs import record_of
from unirl.config.errors import ArgumentError
from unirl.config.failures import Session
from unirl.tracking.comparison import (
    Cost,
    PairedOutcome,
    SettingDifference,
    cost_of,
    last_evaluation,
    notes_on,
    outcome_of,
    progress_of,
    setting_differences,
)
from unirl.tracking.console import duration, printable
from unirl.tracking.paired import FEWEST_PROMPTS, LEVEL, PairedDifference
from unirl.tracking.record import RunRecord
from unirl.tracking.streams import print_inert
from unirl.tracking.tables import finite

EXAMPLES = (
    "unirl compare runs/unirl/first runs/unirl/second",
    "unirl compare runs/unirl/*",
    "unirl compare runs/unirl/first runs/unirl/second --json",
)
WIDTH = 100
LONGEST_KEY, LONGEST_VALUE = 40, 60
"""Columns of the keys of settings, and characters that are shown of a value."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser("compare", "Compare runs with the first one: settings, held-out rewards, cost.", EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    if not 2 <= len(options.runs) <= len(ascii_uppercase):
        raise ArgumentError(
            f"unirl compare needs 2 to {len(ascii_uppercase)} runs, got {len(options.runs)}. "
            "One run alone: unirl report RUN"
        )
    runs = [record_of(path) for path in options.runs]
    if options.json:
        print(json.dumps(finite(as_json(runs)), indent=1))
    else:
        print_inert("\n".join(lines(runs)))
    return 0


def between(runs: Sequence[RunRecord]) -> list[PairedOutcome | None]:
    """The last evaluation of the first run beside that of each other run. None where one has no evaluation."""
    first, *others = [last_evaluation(run) for run in runs]
    return [None if first is None or other is None else outcome_of(first, other) for other in others]


def as_json(runs: Sequence[RunRecord]) -> dict[str, object]:
    """The comparison as JSON data. `outcome` of a run is its last evaluation against its first one."""
    differences = setting_differences(runs)
    content = {
        "runs": [
            {
                "path": str(run.root),
                "recipe": None if run.facts is None else run.facts.recipe,
                "scale": None if run.facts is None else run.facts.scale,
                "status": run.status.state,
                "steps": run.metrics.count,
                "total_steps": run.total_steps,
                "outcome": _outcome_json(progress_of(run)),
                "cost": asdict(cost_of(run)) | {"total_s": cost_of(run).total_s},
            }
            for run in runs
        ],
        "settings": [
            {"key": each.key, "values": [_plain(value) for value in each.values], "sources": each.sources}
            for each in differences
        ],
        "against_first": [_outcome_json(outcome) for outcome in between(runs)],
        "level": LEVEL,
        "notes": notes_on(runs, differences),
    }
    return content | {"problems": {str(run.root): list(run.problems) for run in runs}}  # last: all parts are read now


def lines(runs: Sequence[RunRecord]) -> Iterator[str]:
    """The comparison as text."""
    differences = setting_differences(runs)
    for letter, run in zip(ascii_uppercase, runs, strict=False):
        yield f"{letter}  {run.root}   {_state(run)}"
    yield from ("", *_setting_lines(differences))
    yield from ("", *_outcome_lines(runs))
    yield from ("", *_cost_lines([cost_of(run) for run in runs]))
    notes = notes_on(runs, differences)
    notes += [f"{run.root}: {problem}" for run in runs for problem in run.problems]
    yield from [""] if notes else []
    yield from (f"note: {printable(note)}" for note in notes)


def _state(run: RunRecord) -> str:
    steps = f"{run.metrics.count}/{'?' if run.total_steps is None else run.total_steps} steps"
    facts = [] if run.facts is None else [run.facts.recipe, *([run.facts.remark] if run.facts.remark else [])]
    return ", ".join([*facts, run.status.state, steps])


def _setting_lines(differences: Sequence[SettingDifference]) -> Iterator[str]:
    """A line per setting that differs, or several if it is long. Defaults that some runs lack are only counted."""
    shown = [each for each in differences if not each.is_absent_default]
    hidden = len(differences) - len(shown)
    yield "Settings that differ" if shown else "Settings: none differ"
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    keys = [printable(each.key) for each in shown]
    longest = min(max(map(len, keys), default=0), LONGEST_KEY)
    for key, each in zip(keys, shown, strict=True):
        values = [f"{letter} {_short(value)}" for letter, value in zip(ascii_uppercase, each.shown, strict=False)]
        line = f"  {key:<{longest}}  {'   '.join(values)}"
        yield from [line] if len(line) <= width else [f"  {key}", *(f"    {value}" for value in values)]
    if hidden:
        yield f"  and {hidden} defaults of parts that only some of the runs have (all are listed by --json)"


def _outcome_lines(runs: Sequence[RunRecord]) -> Iterator[str]:
    yield f"Held-out scores: mean over prompts, difference with its {LEVEL:.0%} interval (paired over n prompts)"
    named: list[tuple[str, str, PairedOutcome | None]] = [
        (letter, "two evaluations", progress_of(run)) for letter, run in zip(ascii_uppercase, runs, strict=False)
    ]
    named += [
        (f"A -> {letter}", "an evaluation of both", outcome)
        for letter, outcome in zip(ascii_uppercase[1:], between(runs), strict=False)
    ]
    for label, needed, outcome in named:
        if outcome is None:
            yield f"  {label:<7}no figure: it needs {needed}"
        elif not outcome.differences:
            yield f"  {label:<7}no figure: no prompt was scored in both evaluations"
        else:
            yield from _rows_of(label, outcome)


def _rows_of(label: str, outcome: PairedOutcome) -> Iterator[str]:
    steps = "step {} -> {}".format(*outcome.steps)
    both = "" if outcome.prompts == (outcome.common,) * 2 else " of {} and {}".format(*outcome.prompts)
    yield f"  {label:<7}{steps}, {outcome.common}{both} prompts"
    width = max(len(printable(each.name)) for each in outcome.differences)
    for each in outcome.differences:
        yield f"    {printable(each.name):<{width}}  {change(each)}"


def change(each: PairedDifference) -> str:
    """`0.496 -> 0.839   +0.343 [+0.280, +0.407]   n=6`."""
    interval = (
        f"(no interval: fewer than {FEWEST_PROMPTS} prompts)"
        if each.interval is None
        else f"[{each.interval.low:+.3f}, {each.interval.high:+.3f}]"
    )
    return f"{each.before:.3f} -> {each.after:.3f}   {each.difference:+.3f} {interval}   n={each.num_prompts}"


def _cost_lines(costs: Sequence[Cost]) -> Iterator[str]:
    rows: list[tuple[str, Callable[[Cost], str]]] = [
        ("steps", lambda cost: str(cost.steps)),
        ("samples", lambda cost: str(cost.samples)),
        ("time", lambda cost: duration(cost.total_s)),
        ("time of steps", lambda cost: duration(cost.step_s)),
    ]
    phases = dict.fromkeys(name for cost in costs for name in cost.phases)
    rows += [(f"  {printable(name)}", _phase(name)) for name in phases]
    rows += [
        ("samples/s", lambda cost: "-" if cost.samples_per_s is None else f"{cost.samples_per_s:.2f}"),
        ("host memory, peak", lambda cost: _gib(cost.host_gib)),
        ("device memory, peak", lambda cost: _gib(cost.device_gib)),
    ]
    cells = [(name, *(shown(cost) for cost in costs)) for name, shown in rows]
    cells = [("Cost", *ascii_uppercase[: len(costs)]), *cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(costs) + 1)]
    for number, (name, *values) in enumerate(cells):
        indent = "" if number == 0 else "  "
        columns = [f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True)]
        yield f"{indent + name:<{widths[0] + 2}}  {'  '.join(columns)}"


def _phase(name: str) -> Callable[[Cost], str]:
    return lambda cost: f"{cost.phases[name]:.1f}s" if name in cost.phases else "-"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GiB"


def _short(value: str) -> str:
    text = printable(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 4]} ..."


def _outcome_json(outcome: PairedOutcome | None) -> dict[str, object] | None:
    if outcome is None:
        return None
    scores = {each.name: asdict(each) | {"difference": each.difference} for each in outcome.differences}
    return {"steps": outcome.steps, "prompts": outcome.prompts, "samples": outcome.samples, "scores": scores}


def _plain(value: object) -> object:
    """A value of YAML as one of JSON: dates become text."""
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
