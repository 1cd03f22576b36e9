"""`unirl runs [FOLDER]`: the runs in a folder, with the state, the steps and the reward of each."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.config.errors import NotFoundError
from unirl.config.failures import Session
from unirl.tracking.catalog import RunOverview, overview_of, run_roots
from unirl.tracking.record import RunRecord
from unirl.tracking.run_directory import REMARKS
from unirl.tracking.streams import print_inert

EXAMPLES = ("unirl runs", "unirl runs runs/unirl", "unirl runs /data/runs --json")
FOLDER = "runs"
STATES: Mapping[str, str] = {
    "running": "its heartbeat is fresh",
    "stalled": "its process is alive, but its heartbeat is old",
    "finished": "all steps are done",
    "stopped": "ended by a signal, with a checkpoint",
    "failed": "ended with an error (its exit status)",
    "lost": "its process is gone and left no record of its end",
}
WIDTH = 100


def run(argv: list[str], session: Session) -> int:
    parser = Parser("runs", "List the runs in a folder, newest first.", EXAMPLES)
    parser.add_argument("folder", nargs="?", default=FOLDER, metavar="FOLDER", help="default: runs")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    runs = runs_in(Path(options.folder))
    if options.json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
    elif not runs:
        print(f"no run in {options.folder}. Start one: unirl quickstart")
    else:
        print_inert(table(runs))
    return 0


def runs_in(folder: Path) -> list[RunOverview]:
    """The runs in and below `folder`, newest first. None for a folder `runs` that does not exist yet.

    Raises:
        NotFoundError: 4001 when another folder does not exist.
    """
    if not folder.is_dir() and str(folder) != FOLDER:
        raise NotFoundError(f"there is no folder {folder}. Name the folder of a run, or one that holds runs")
    found = [overview_of(RunRecord(root)) for root in run_roots(folder)]
    return sorted((run for run in found if run.is_readable), key=lambda run: run.created, reverse=True)


def record_of(path: str) -> RunRecord:
    """The files of the run in the folder `path`. Raises NotFoundError (4001) if it is no directory of a run."""
    record = RunRecord(path)
    if not record.exists:
        what = "there is no such folder" if not record.root.is_dir() else "it has neither run.json nor metrics.jsonl"
        raise NotFoundError(f"{path} is not the directory of a run: {what}. Runs are listed by `unirl runs`")
    return record


def table(runs: Sequence[RunOverview]) -> str:
    """One line per run, or two where path and recipe do not fit beside the rest."""
    rows = [
        ("STATUS", "STEPS", "REWARD", "AGE", "RECIPE", "RUN"),
        *((*run.cells, run.recipe + (f" ({run.scale})" if run.scale in REMARKS else ""), run.path) for run in runs),
    ]
    sizes = [max(len(row[column]) for row in rows) for column in range(5)]
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    fits = sum(sizes) + 10 + max(len(row[5]) for row in rows) <= width
    lines = []
    for row in rows:
        shown = 5 if fits else 4
        head = "  ".join(f"{cell:<{size}}" for cell, size in zip(row[:shown], sizes[:shown], strict=True))
        lines.append(f"{head}  {row[5]}".rstrip() if fits else f"{head}  {row[4]}\n   {row[5]}")
    states = [state for state in STATES if any(run.status == state for run in runs)]
    remarks = [REMARKS[scale] for scale in REMARKS if any(run.scale == scale for run in runs)]
    legend = "; ".join([*(f"{state}: {STATES[state]}" for state in states), *remarks])
    ways = ["Follow one: unirl tail RUN"]
    if not {"stopped", "failed", "lost"}.isdisjoint(states):
        ways.append("Continue one from its last checkpoint: see `resume` in RUN/logs/console.log")
    return "\n".join([*lines, "", textwrap.fill(f"{legend}.", width), *ways])
