"""`unirl tail [RUN]`: the console lines of a run, from its files, until it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.runs import FOLDER, runs_in
from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.config.failures import Session
from unirl.tracking.run_directory import status_of
from unirl.tracking.streams import inert, print_inert, say

EXAMPLES = ("unirl tail", "unirl tail runs/unirl/first", "unirl tail runs/unirl/first -n 100")
ALIVE = ("running", "stalled")
POLL_S = 0.5


def run(argv: list[str], session: Session) -> int:
    parser = Parser("tail", "Print the console lines of a run, and follow it until it ends. Ctrl-C leaves.", EXAMPLES)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the directory of a run (default: the newest in runs/)")
    parser.option("-n", "--lines", type=int, default=20, metavar="N", help="earlier lines to print (default 20)")
    options = parser.parse(argv)
    if options.lines < 0:
        raise InvalidValueError(f"--lines must be >= 0, got {options.lines}")
    root = Path(options.run) if options.run is not None else newest_run()
    try:
        for line in follow(log_of(root), root, options.lines):
            print_inert(line, end="", flush=True)
    except KeyboardInterrupt:
        return 0
    status = status_of(root)
    reason = f": {status.reason}" if status.reason else ""
    say(inert(f"unirl: {root} {status.state}{reason}"))
    return 0


def newest_run() -> Path:
    """The run in runs/ that was created last. Raises NotFoundError (4001) if there is none."""
    runs = runs_in(Path(FOLDER))
    if not runs:
        raise NotFoundError(f"there is no run in {FOLDER}/. Name the directory of a run: unirl tail RUN")
    return Path(runs[0].path)


def log_of(root: Path) -> Path:
    """The file with the console lines of a run. Raises NotFoundError (4001) if `root` is no directory of a run."""
    log = root / "logs" / "console.log"
    if not (root / "run.json").is_file() or not log.is_file():
        what = "there is no such folder" if not root.is_dir() else "it has no run.json or no logs/console.log"
        raise NotFoundError(f"{root} is not the directory of a run: {what}. Runs are listed by `unirl runs`")
    return log


def follow(log: Path, root: Path, num_earlier: int, poll_s: float = POLL_S) -> Iterator[str]:
    """The last `num_earlier` lines of the log, and then each new line until the run has ended."""
    with log.open(encoding="utf-8", errors="replace") as file:
        yield from deque(file, maxlen=num_earlier)
        while True:
            is_alive = status_of(root).state in ALIVE
            yield from file  # The lines that a run writes before it ends are read after its end was seen.
            if not is_alive:
                return
            time.sleep(poll_s)
