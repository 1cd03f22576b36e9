"""`unirl replay RUN --step N`: repeats a recorded step, and says whether the bits agree."""

from __future__ import annotations

import json
import time
from pathlib import Path

from unirl.cli.arguments import Parser, split_settings
from unirl.cli.runs import record_of
from unirl.cli.start import shown_start
from unirl.config.errors import ReplayError
from unirl.config.failures import Session
from unirl.plan.geometry import count_of
from unirl.tracking.run_files import RunFiles
from unirl.tracking.streams import print_inert
from unirl.trainer.assemble import build_trainer
from unirl.trainer.replaying import compare, repeat, start_point, write_trace
from unirl.trainer.run_folder import quiet_tracker
from unirl.trainer.run_state import threads_in
from unirl.trainer.saved_rollouts import check_saved_rows

EXAMPLES = (
    "unirl replay runs/unirl/first --step 12",
    "unirl replay runs/unirl/first --step 12 --trace",
    "unirl replay runs/unirl/first --step 12 --train",
    "unirl replay runs/unirl/first --step 12 --sample 'train.jsonl:6@1:0' --out again",
)
SHOWN = 8
"""Differences that are printed."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser(
        "replay",
        "Repeat a recorded step from the nearest checkpoint before it, and compare its metrics, samples and rewards "
        "with the record. The steps between are trained again. Exit status 9 if anything differs.",
        EXAMPLES,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory with a checkpoint")
    parser.option("--step", type=int, required=True, metavar="N", help="the step, from 1, as in metrics.jsonl")
    parser.option(
        "--sample",
        metavar="ID",
        help="compare and show this sample only, by its sample_id in samples/step-N/manifest.jsonl",
    )
    parser.option("--out", metavar="DIR", help="all samples of the repeated step; default: RUN/replays/...")
    parser.option("--trace", action="store_true", help="also draw the latents at each stored denoising step, as strips")
    parser.option(
        "--train",
        action="store_true",
        help="also train the step, on the rows that the run saved (tracking.save_rollouts), and compare its metrics",
    )
    parser.option("--json", action="store_true", help="the result as JSON, last on stdout")
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    root = record_of(options.run).root
    start = start_point(root, options.step, overrides)
    if options.train:
        check_saved_rows(root, options.step)
    out = Path(options.out or root / "replays" / f"step-{options.step:06d}-{time.strftime('%Y%m%d-%H%M%S')}")
    with (
        shown_start(Session(), "repeating") as shown,
        build_trainer(
            start.saved.recipe,
            session,
            tracker=quiet_tracker(start.saved, out, session.argv, shown),
            recorded=threads_in(start.saved.checkpoint),
        ) as trainer,
    ):
        resp = repeat(trainer, start, options.step, root if options.train else None)
        result = compare(root, out, options.step, options.sample)
        traced = write_trace(trainer, resp, out / "trace", options.sample) if options.trace else None
    facts = {
        "step": options.step,
        "start": str(start),
        "metrics": result.metrics,
        "samples": result.samples,
        "differences": [str(each) for each in result.differences],
        "out": str(out),
        "trace": None if traced is None else str(traced),
    }
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts, start.step, options.sample, out)
    if result.differences:
        raise ReplayError(
            f"step {options.step} is not what {root} recorded ({len(result.differences)} differences, the first: "
            f"{result.differences[0]}). Bits may differ with the processor, the number of threads, the versions of "
            "libraries, and rewards that are asked over a network; env.json has the environment of the run"
        )
    return 0


def _show(facts: dict[str, object], start: int, sample: str | None, out: Path) -> None:
    step = facts["step"]
    assert isinstance(step, int)
    before = count_of(step - 1 - start, "step")
    print_inert(f"repeated step {step} from {facts['start']}, with {before} trained before it")
    for row in RunFiles(out).rows("events.jsonl"):
        if row.get("ev") == "warning":
            print_inert(f"warning  {row.get('text')}")
    differences = facts["differences"]
    assert isinstance(differences, list)
    for line in differences[:SHOWN]:
        print_inert(f"differs  {line}")
    verdict = "all bits agree" if not differences else f"{len(differences)} differences"
    kept = "" if facts["samples"] else " (the run stored none of this step)"
    print_inert(f"{facts['metrics']} metrics and {facts['samples']} samples{kept} compared: {verdict}")
    folder = out / "samples" / f"step-{step:06d}"
    for row in RunFiles(folder).rows("manifest.jsonl"):
        if row.get("sample_id") == sample:
            shown = row.get("text") or folder / str(row.get("file"))
            print_inert(f"sample   {sample}: reward {row['reward']:.6g}, prompt {row['prompt']!r}\n         {shown}")
    print_inert(f"samples  {folder}")
    if facts["trace"] is not None:
        print_inert(f"trace    {facts['trace']}")
