"""Kills one worker of a distributed run at random, and records the error and the processes that are left.

    python scripts/kill_workers.py --trials 20 --seed 1 --out benchmarks/kill_workers.json
    python scripts/kill_workers.py --trials 6 --seed 2 --restarts --out benchmarks/recovery.json
    python scripts/kill_workers.py --trials 8 --relations ahead elastic --out benchmarks/kill_workers_ahead.json

A trial starts a toy recipe on Ray workers and kills one of them by SIGKILL at a random moment. It measures the seconds
until the run has reported the cause and ended, and lists the processes that are alive 5 s later. Then it resumes the
run and compares metrics, ledger and final weights with a run that was never killed, bit for bit.

With --restarts the run recovers by itself (`restarts`). A trial measures the seconds from the kill until the run has
started again and until it has finished its next step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from hashlib import sha256
from pathlib import Path

SPARE_STEPS = 12
"""The smallest number of steps that remain when a worker is killed, so that a kill is well before the end."""
MARK = "UNIRL_KILL_TRIAL"
"""Environment variable by which all processes of a trial are recognised, because they inherit it."""
CLOCKS = ("time/", "mem/", "throughput/", "queue/")
DEADLINE_S = 15.0
LEFTOVER_S = 5.0
SEPARATE = "diffusion/sd3_replica_lora_separate"
IN_TURNS = {
    "trainside": ("diffusion/sd3_trainside",),
    "colocate": ("diffusion/sd3_replica_lora_colocate",),
    "separate": (SEPARATE,),
}
JOIN = ("asynchronous.elastic=true", "reward_parts=4", "placement.reward=cpu", "batch_size=4")
RELATIONS = {
    **IN_TURNS,
    "ahead": (SEPARATE, "asynchronous.max_staleness=2"),
    "elastic": (SEPARATE, "asynchronous.max_staleness=1", *JOIN),
}
"""A recipe and its overrides, by the way in which training and sampling share the devices."""


def command(folder: Path, relation: str, steps: int, more: tuple[str, ...]) -> list[str]:
    recipe, *own = RELATIONS[relation]
    overrides = (
        "scale=toy",
        "runtime=ray",
        "num_devices=2",
        f"num_rollouts={steps}",
        "save_interval=1",
        "tracking.sample_steps=0",
        "evaluation.eval_steps=0",
        f"run.dir={folder}",
        *own,
        *more,
    )
    return [sys.executable, "-m", "unirl.train_diffusion", f"--config-name={recipe}", *overrides]


class Run:
    """A run of the command line. All of its processes have the mark in their environment."""

    def __init__(self, folder: Path, relation: str, steps: int, *more: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = Path(f"{folder}.log")
        self.folder = folder
        with open(self.log, "ab") as log:
            self.driver = subprocess.Popen(
                command(folder, relation, steps, more), env=os.environ | {MARK: self.mark}, stdout=log, stderr=log
            )

    def processes(self) -> dict[int, str]:
        """Maps the pid of every living process of this run to its command line."""
        return {pid: line for pid, line in processes() if f"{MARK}={self.mark}".encode() in environment(pid)}

    def workers(self) -> list[int]:
        """The pids of the Ray workers that hold roles."""
        return sorted(pid for pid, line in self.processes().items() if line.startswith("ray::Worker"))

    def steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.driver.wait()


def processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            line = read(entry / "cmdline").replace(b"\0", b" ").decode(errors="replace")
            if line:
                yield int(entry.name), line


def environment(pid: int) -> bytes:
    return read(Path(f"/proc/{pid}/environ"))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def outcome(folder: Path, steps: int) -> dict[str, object]:
    """Returns the results that must be equal in a resumed and an uninterrupted run."""
    final = folder / "checkpoints" / f"checkpoint-{steps:06d}" / "policy"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows],
        "ledger": (folder / "ledger.jsonl").read_text(),
        "weights": {path.name: digest(path) for path in sorted(final.rglob("*")) if path.is_file()},
    }


def digest(path: Path) -> str:
    """A hash of a file. For safetensors files it does not depend on the order of the entries in the header."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return sha256(data).hexdigest()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:size]), sort_keys=True)
    return sha256(header.encode() + data[size:]).hexdigest()


def finish(folder: Path, relation: str, steps: int) -> dict[str, object]:
    """Starts or resumes the run, waits until it is finished, and returns its outcome."""
    run = Run(folder, relation, steps)
    try:
        status = run.driver.wait(300)
    finally:
        run.end()
    assert status == 0, run.log.read_text()[-3000:]
    return outcome(folder, steps)


def kill_a_worker(run: Run, steps: int, choice: random.Random) -> tuple[int, int, float]:
    """Kills a worker at a random moment. Returns its pid, the steps that were finished, and the delay after them."""
    wanted, delay = choice.randint(1, steps - SPARE_STEPS), choice.uniform(0.0, 0.5)
    assert wait_until(lambda: run.steps() >= wanted, 240), run.log.read_text()[-3000:]
    time.sleep(delay)
    workers = run.workers()
    assert workers, f"no worker to kill among {run.processes()}"
    victim, step = choice.choice(workers), run.steps()
    os.kill(victim, signal.SIGKILL)
    return victim, step, delay


def recovery(folder: Path, relation: str, steps: int, choice: random.Random) -> dict[str, object]:
    """Kills one worker of a run that recovers by itself. Returns when, and how long the recovery took."""
    run = Run(folder, relation, steps)
    try:
        victim, step, delay = kill_a_worker(run, steps, choice)
        killed = time.time()
        status = run.driver.wait(400)
        gone = wait_until(lambda: not run.processes(), LEFTOVER_S)
    finally:
        run.end()
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    restarts = [row for row in rows if row["ev"] == "run.restart"]
    after = [seconds_of(row) - killed for row in rows if row["ev"] == "step.end" and seconds_of(row) > killed + 0.5]
    again = [seconds_of(row) - killed for row in restarts]
    named = [row for row in restarts if str(victim) in row["error"]]
    return {
        "relation": relation,
        "after_step": step,
        "delay_s": round(delay, 2),
        "status": status,
        "seconds_to_restart": round(again[0], 2) if again else None,
        "seconds_to_next_step": round(min(s for s in after if s > again[0]), 2) if again else None,
        "ok": status == 0 and gone and len(restarts) == len(named) == 1,
    }


def seconds_of(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["t"]).timestamp()


def trial(folder: Path, relation: str, steps: int, choice: random.Random) -> dict[str, object]:
    """Kills one worker of a run, and returns when, the error and its delay, and the processes that were left."""
    run = Run(folder, relation, steps, "restarts.max=0")
    try:
        victim, step, delay = kill_a_worker(run, steps, choice)
        start = time.monotonic()
        ended = wait_until(lambda: run.driver.poll() is not None, 60)
        seconds = time.monotonic() - start
        gone = wait_until(lambda: not run.processes(), LEFTOVER_S)
        left = run.processes()
        status = run.driver.poll()
    finally:
        run.end()
    errors = [line for line in run.log.read_text().splitlines() if line.startswith("error[")]
    return {
        "relation": relation,
        "after_step": step,
        "delay_s": round(delay, 2),
        "status": status,
        "seconds_to_end": round(seconds, 2),
        "said": errors[-1] if errors else "",
        "names_the_worker": bool(errors) and str(victim) in errors[-1],
        "processes_left": list(left.values()),
        "ok": ended and seconds <= DEADLINE_S and gone and status == 10 and bool(errors) and str(victim) in errors[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help=f"steps of a run, more than {SPARE_STEPS} (default 24)")
    parser.add_argument("--relations", nargs="+", choices=RELATIONS, default=list(IN_TURNS))
    parser.add_argument("--restarts", action="store_true", help="let the run recover by itself")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    choice = random.Random(options.seed)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        unbroken = {}
        for number in range(options.trials):
            relation = options.relations[number % len(options.relations)]
            if relation not in unbroken:
                unbroken[relation] = finish(Path(scratch, f"unbroken-{relation}"), relation, options.steps)
            folder = Path(scratch, f"trial-{number}")
            result = (recovery if options.restarts else trial)(folder, relation, options.steps, choice)
            resumed = (
                outcome(folder, options.steps) if result["status"] == 0 else finish(folder, relation, options.steps)
            )
            result["differs_in"] = [name for name, value in unbroken[relation].items() if resumed[name] != value]
            result["resumed_exactly"] = not result["differs_in"]
            results.append(result)
            print(json.dumps(result), flush=True)
    good = sum(bool(r["ok"] and r["resumed_exactly"]) for r in results)
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    summary = {"trials": len(results), "good": good, "seed": options.seed, "machine": machine, "results": results}
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    what = "recovered by itself" if options.restarts else f"cause named within {DEADLINE_S:g} s"
    print(f"{good} of {len(results)} trials: {what}, nothing left, equal to the unkilled run")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
