"""Trains the quick start of prompt enhancement with three seeds: both policies, one alone, and the other alone.

    OMP_NUM_THREADS=1 python scripts/pe_ablations.py          # nine runs of about four minutes on one core
    python scripts/pe_ablations.py --render                   # writes the table of the stored result again

The result is benchmarks/pe_ablations.json, which is written after each run. A script that was stopped goes on with the
runs that are missing. The table stands in docs/prompt_enhancement.md between two comments. Exit status 1: with both
policies trained, the held-out reward of a seed rose by less than --rise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.quickstart_table import circumstances, run  # noqa: E402

RECIPE = "pe/quickstart"
RESULT = ROOT / "benchmarks" / "pe_ablations.json"
PAGE = ROOT / "docs" / "prompt_enhancement.md"
BEGIN, END = "<!-- scripts/pe_ablations.py: begin -->", "<!-- scripts/pe_ablations.py: end -->"
SEEDS = (42, 1, 2)
TRAINED = {
    "[ar,diffusion]": "both",
    "[ar]": "only the rewriter (`trained=[ar]`)",
    "[diffusion]": "only the diffusion model (`trained=[diffusion]`)",
}
"""The values of the setting `trained`, and their names in the table."""
SHOWN = ("eval/reward_mean", "eval/reward_stderr", "eval/exact_mean")

Report = dict[str, Any]


def measured(report: Report) -> Report:
    """Run the trials that the report lacks, write the report after each of them, and return it."""
    done = {(trial["trained"], trial["seed"]) for trial in report["trials"]}
    for trained in TRAINED:
        for seed in SEEDS:
            if (trained, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                trial = run(RECIPE, seed, [f"trained={trained}"], Path(scratch, "run"), SHOWN)
            print(f"trained={trained} {trial}", flush=True)
            report["trials"].append({"trained": trained, **asdict(trial)})
            RESULT.write_text(json.dumps(report, indent=1) + "\n")
    return report


def table(report: Report) -> str:
    """The report as a Markdown table, followed by the date, the commit and the number of cores."""
    trials = sorted(report["trials"], key=lambda trial: (list(TRAINED).index(trial["trained"]), trial["seed"] != 42))
    steps = [int(evaluation["step"]) for evaluation in trials[0]["evaluations"]]
    between = " | ".join(f"after {step} steps" for step in steps[1:])
    lines = [
        f"| seed | trained | held-out reward before | {between} | both attributes right |",
        "|---" * (len(steps) + 3) + "|",
        *(f"| {trial['seed']} | {TRAINED[trial['trained']]} | {_path(trial['evaluations'])} |" for trial in trials),
        "",
        f"Measured on {report['date']} at commit {report['commit']} with {report['cores']} CPU cores, by "
        "`scripts/pe_ablations.py`. After +- stands the standard error over the requests.",
    ]
    return "\n".join(lines)


def _path(evaluations: Sequence[dict[str, float]]) -> str:
    """The cells of a trial: the reward of each evaluation, and the first and last share of images that are right."""
    rewards = [f"{each['eval/reward_mean']:.3f} +- {each['eval/reward_stderr']:.3f}" for each in evaluations]
    first, last = (evaluations[at]["eval/exact_mean"] for at in (0, -1))
    return " | ".join([*rewards, f"{first:.3f} -> {last:.3f}"])


def with_table(page: str, report: Report) -> str:
    """The page, with the table of the report in place of the text between the two comments."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table(report)}\n{END}{rest.split(END)[1]}"


def smallest_rise(report: Report) -> float:
    """The smallest rise of the held-out reward among the seeds with which both policies are trained."""
    rewards = [
        [each["eval/reward_mean"] for each in trial["evaluations"]]
        for trial in report["trials"]
        if trial["trained"] == next(iter(TRAINED))
    ]
    return min(values[-1] - values[0] for values in rewards)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--again", action="store_true", help="measure all runs again, also those of the stored result")
    parser.add_argument("--rise", type=float, default=0.2)
    options = parser.parse_args()
    if RESULT.exists() and not options.again:
        report = json.loads(RESULT.read_text())
    else:
        report = {"recipe": RECIPE, **circumstances(), "trials": []}
    if not options.render:
        report = measured(report)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    print(table(report))
    return 0 if smallest_rise(report) >= options.rise else 1


if __name__ == "__main__":
    sys.exit(main())
