"""`unirl report RUN`: one HTML file that shows a run, to read, print or send."""

from __future__ import annotations

import math
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.runs import record_of
from unirl.config.errors import InvalidValueError
from unirl.config.failures import Session
from unirl.tracking.report import DEFAULT_MB, ReportTooLarge, write_report
from unirl.tracking.streams import inert, print_inert, say

EXAMPLES = (
    "unirl report runs/unirl/first",
    "unirl report runs/unirl/first -o first.html",
    "unirl report runs/unirl/first --max-mb 5",
)
MEGABYTE = 10**6


def run(argv: list[str], session: Session) -> int:
    parser = Parser(
        "report",
        "Write one HTML file about a run: outcome, curves, samples, settings, cost. It needs no network and no script.",
        EXAMPLES,
    )
    parser.add_argument("run", metavar="RUN", help="the directory of a run; it may still be running")
    parser.option("-o", "--out", metavar="FILE", help="default: RUN/report.html")
    largest = f"largest size of the file (default {DEFAULT_MB})"
    parser.option("--max-mb", type=float, default=DEFAULT_MB, metavar="MB", help=largest)
    options = parser.parse(argv)
    if not (options.max_mb > 0 and math.isfinite(options.max_mb)):
        raise InvalidValueError(f"--max-mb must be a positive number, got {options.max_mb:g}")
    record = record_of(options.run)
    path = Path(options.out) if options.out is not None else record.root / "report.html"
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise InvalidValueError(f"--out {path} {what}. Name an HTML file in a folder that exists")
    try:
        images = write_report(record, path, round(options.max_mb * MEGABYTE))
    except ReportTooLarge as error:
        raise InvalidValueError(f"--max-mb {options.max_mb:g} is too small: {error}. Allow more") from error
    except OSError as error:
        raise InvalidValueError(
            f"{path} cannot be written ({error.strerror}). Name a file in a folder of yours with --out"
        ) from error
    for problem in record.problems:
        say(inert(f"unirl: {problem}"))
    if images.omitted:
        say(f"unirl: {images.omitted} images were left out to stay within --max-mb {options.max_mb:g}")
    print_inert(f"{path}   {path.stat().st_size / MEGABYTE:.2f} MB")
    return 0
