"""Attacks a run directory: many processes start in it at once, and a paused owner wakes after another one took over.

    python scripts/attack_run_directory.py --starts 30 --gap-ms 10

Prints how many processes became writers, with locks and on a file system without locks, and what the paused owner could
still publish. Exit status 1: more than one writer, or the woken owner changed a file. Takes some seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unirl.tracking import owner  # noqa: E402
from unirl.tracking.owner import OwnershipLostError, RunDirectoryError  # noqa: E402
from unirl.tracking.run_directory import RunDirectory, RunIdentity  # noqa: E402
from unirl.train.backend.checkpoint import CheckpointStore  # noqa: E402

IDENTITY = RunIdentity(project="attack", recipe="diffusion/quickstart")
FORK = multiprocessing.get_context("fork")
"""A forked process starts within a millisecond, so the starts come as close as they are meant to."""


@dataclass(frozen=True)
class Starts:
    """The outcome of many starts in one folder."""

    writers: list[int]
    """Ids of the processes that opened the folder for writing."""
    refusals: list[str]


def starts(root: Path, count: int, gap_s: float, has_locks: bool = True) -> Starts:
    """Start `count` processes in one folder, `gap_s` seconds apart. Each that may write stays until all have tried."""
    everyone_tried, answers = FORK.Event(), FORK.SimpleQueue()
    begin = time.monotonic() + 0.2
    children = [
        FORK.Process(target=_start, args=(root, begin + i * gap_s, has_locks, everyone_tried, answers))
        for i in range(count)
    ]
    for child in children:
        child.start()
    said = [answers.get() for _ in children]
    everyone_tried.set()
    for child in children:
        child.join()
    return Starts([pid for pid, refusal in said if not refusal], [refusal for _, refusal in said if refusal])


def _start(root, moment, has_locks, everyone_tried, answers) -> None:  # type: ignore[no-untyped-def]
    if not has_locks:
        owner._lock = lambda descriptor: None
    time.sleep(max(moment - time.monotonic(), 0))
    try:
        run = RunDirectory(root, IDENTITY)
    except RunDirectoryError as error:
        answers.put((os.getpid(), str(error)))
        return
    answers.put((os.getpid(), ""))
    everyone_tried.wait()
    run.close(0)


@dataclass(frozen=True)
class Woken:
    """The attempts of a paused owner to publish something after another process took over its run."""

    refusals: dict[str, str]
    """The error of each attempt to publish something."""
    changed: list[str]
    """Files that differ after the attempts."""


def woken_owner(root: Path) -> Woken:
    """Pause an owner on another host in the middle of a save, take its run over, and let it go on."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=_owner_on_another_host, args=(root, theirs))
    child.start()
    assert ours.recv() == "saving"
    os.kill(child.pid, signal.SIGSTOP)
    os.utime(root / "heartbeat", (0, 0))  # as after a minute of silence
    lock, owner._lock = owner._lock, lambda descriptor: None
    try:
        run = RunDirectory(root, IDENTITY)
    finally:
        owner._lock = lock
    CheckpointStore(run.checkpoints, check_writer=run.fence.check).collect()
    before = _files(root)
    os.kill(child.pid, signal.SIGCONT)
    ours.send("go on")
    refusals = ours.recv()
    child.join()
    after = _files(root)
    run.close(0)
    return Woken(refusals, sorted(name for name in before | after if before.get(name) != after.get(name)))


def _owner_on_another_host(root: Path, pipe: Connection) -> None:
    owner._lock = lambda descriptor: None
    socket.gethostname = lambda: "another-host"
    run = RunDirectory(root, IDENTITY)
    store = CheckpointStore(run.checkpoints, check_writer=run.fence.check)

    def interrupted_save() -> None:
        with store.stage(1) as folder:
            pipe.send("saving")
            pipe.recv()
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_text("old")

    def save() -> None:
        with store.stage(2) as folder:
            (folder / "weights").write_text("old")

    refusals = {}
    attempts = {"checkpoint under way": interrupted_save, "checkpoint": save}
    attempts |= {"state": lambda: run.note(chosen={}), "config": lambda: run.write_config("a: 1", "a: 1")}
    attempts |= {"samples": lambda: run.fresh_step_folder("samples", 3), "end": lambda: run.close(0)}
    for name, attempt in attempts.items():
        try:
            attempt()
        except OwnershipLostError as error:
            refusals[name] = str(error)
    pipe.send(refusals)


def _files(root: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "heartbeat"]
    return {str(path.relative_to(root)): (path.stat().st_ino, path.read_bytes()) for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=30, help="processes (default 30)")
    parser.add_argument("--gap-ms", type=float, default=10, help="milliseconds between their starts (default 10)")
    options = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as place:
        for has_locks, words in ((True, "with locks"), (False, "without locks")):
            folder = Path(place, words)
            result = starts(folder, options.starts, options.gap_ms / 1000, has_locks)
            print(f"{words}: writers {len(result.writers)} of {options.starts}")
            status |= len(result.writers) != 1
        woken = woken_owner(Path(place, "paused"))
        print(f"woken owner: {len(woken.refusals)} of 6 attempts refused, files changed: {len(woken.changed)}")
        status |= len(woken.refusals) != 6 or bool(woken.changed)
    return status


if __name__ == "__main__":
    sys.exit(main())
