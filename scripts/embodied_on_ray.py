"""Runs every recipe of policies that act at toy scale, in one process and on a Ray worker, and compares all bits.

    OMP_NUM_THREADS=1 python scripts/embodied_on_ray.py                          every recipe: about 15 minutes
    OMP_NUM_THREADS=1 python scripts/embodied_on_ray.py embodied/cartpole_ppo    only these; the others stay as they are
    python scripts/embodied_on_ray.py --render                                   only writes the table again

A run is two steps, evaluations and an export. What is compared is what `recipe_net.py` records. The result is
`benchmarks/embodied_on_ray.json`, which the table of docs/embodied.md shows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import recipe_net

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "embodied_on_ray.json"
PAGE = ROOT / "docs" / "embodied.md"
BEGIN, END = "<!-- embodied on ray: begin -->", "<!-- embodied on ray: end -->"
RUNTIMES = ("local", "ray")
DEATHS = re.compile(r"\b(died|dies|crashed|SIGKILL|SIGSEGV|unexpectedly)\b")
"""The text of Ray about a process that ended although nobody had ended it."""

Result = dict[str, dict[str, Any]]


def run_captured(case: recipe_net.Case, folder: str) -> None:
    """`recipe_net.run_case`, with what libraries write past Python in `folder`/native.txt."""
    with Path(folder, "native.txt").open("wb") as native:
        os.dup2(native.fileno(), 1)
        os.dup2(native.fileno(), 2)
    recipe_net.run_case(case, folder)


def run(recipe: str, runtime: str, forks: Any) -> dict[str, Any]:
    """The record of one run, the seconds that it took, and the lines that tell of dead processes."""
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        child = forks.Process(
            target=run_captured, args=(recipe_net.Case(recipe, (f"runtime={runtime}", "num_devices=1")), scratch)
        )
        child.start()
        child.join()
        seconds = round(time.perf_counter() - start, 1)
        written = [path.read_text(errors="replace") for path in Path(scratch).glob("*.txt")]
        deaths = [line.strip() for text in written for line in text.splitlines() if DEATHS.search(line)]
        return {"record": recipe_net.record_of(Path(scratch)), "seconds": seconds, "deaths": deaths}


def compared(recipe: str, forks: Any) -> dict[str, Any]:
    """The results of a recipe in both runtimes, and the number of values that differ between them."""
    runs = {runtime: run(recipe, runtime, forks) for runtime in RUNTIMES}
    records = [runs[runtime]["record"] for runtime in RUNTIMES]
    row: dict[str, Any] = {
        runtime: {
            "ran": "failed" not in one["record"],
            "seconds": one["seconds"],
            "deaths": one["deaths"],
            **({"failed": one["record"]["failed"]} if "failed" in one["record"] else {}),
        }
        for runtime, one in runs.items()
    }
    return row | {
        "values": count(records[0]),
        "differences": recipe_net.differences(*records),
        "date": str(date.today()),
    }


def count(record: Any) -> int:
    """The number of values in a record."""
    if isinstance(record, Mapping):
        return sum(map(count, record.values()))
    return sum(map(count, record)) if isinstance(record, list) else 1


def table(result: Result) -> str:
    """The rows of the page."""
    lines = ["| recipe | in one process | on a Ray worker | values that differ |", "|---|---|---|---|"]
    for recipe, row in sorted(result.items()):
        states = [
            ("ran" + (", a process died" if row[runtime]["deaths"] else "")) if row[runtime]["ran"] else "failed"
            for runtime in RUNTIMES
        ]
        lines.append(f"| `{recipe}` | {states[0]} | {states[1]} | {len(row['differences'])} of {row['values']} |")
    return "\n".join(lines)


def render(page: str, result: Result) -> str:
    """The page with the table between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table(result)}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", help="default: all")
    parser.add_argument("--render", action="store_true", help="write the table only")
    options = parser.parse_args()
    result: Result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if not options.render:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(list(recipe_net.PRELOADED))
        everything = [case.recipe for case in recipe_net.cases(["embodied/*"]) if not case.overrides]
        for recipe in options.recipes or everything:
            result[recipe] = compared(recipe, forks)
            RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
            print(f"{recipe}: {json.dumps({name: result[recipe][name] for name in RUNTIMES})}", flush=True)
    PAGE.write_text(render(PAGE.read_text(), result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
