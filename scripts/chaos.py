"""Disturbs runs at random moments, lets them go on, and compares them with runs that were never disturbed, bit for bit.

    python scripts/chaos.py --trials 50 --seed 1 --out benchmarks/chaos.json
    python scripts/chaos.py --modes ray --trials 3 --seconds 170 --out benchmarks/chaos.json

A trial disturbs one run one to three times and resumes it whenever it ended. A disturbance is drawn with --seed:
SIGKILL, a pause by SIGSTOP, a pause that ends by SIGKILL, a disk that is full from some moment on (the limit of file
sizes is lowered in the running process, so each file that grows fails), or a jump of the clock by up to a day in either
direction (of Python's clocks, by time-machine). In half of the cases the victim is not the driver but, with Ray, a
worker, and in the mode `service` the reward service, which is started again after it was killed. The run recovers from
both by itself. Then the run finishes, and everything that `tests/trainer/killing.py` compares must be equal. A run that
ends by a full disk must say so by exit status 7.

--out keeps the trials that the file has already, so that the record can be made piece by piece: a trial is known by its
mode and number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reward_service.running import RunningService  # noqa: E402

from tests.trainer.child import begin, jump_clock, said  # noqa: E402
from tests.trainer.killing import Run, Unkilled, after_seconds, after_step, steps_in  # noqa: E402

COMMON = ("keep_checkpoints=2", "evaluation.eval_steps=5", "tracking.sample_steps=4", "save_interval=1")
IMAGES, TEXT = "diffusion/sd3_trainside", str(ROOT / "tests/trainer/text_loop.yaml")
AHEAD = "diffusion/sd3_replica_lora_separate"
JOIN = ("asynchronous.elastic=true", "reward_parts=4", "placement.reward=cpu", "batch_size=4")
RAY = ("stall_timeout_s=60", "restarts.max=9")
SERVICE_REWARD = "diffusion/sd3_nft_reward_service"
MODES = {
    "local": Run(IMAGES, 8, (*COMMON, "scale=toy", "checkpoint.asynchronous=false")),
    "asynchronous": Run(IMAGES, 8, (*COMMON, "scale=toy", "checkpoint.asynchronous=true")),
    "ahead": Run(AHEAD, 8, (*COMMON, "scale=toy", "runtime=local", "asynchronous.max_staleness=2")),
    "elastic": Run(AHEAD, 8, (*COMMON, "scale=toy", "runtime=local", "asynchronous.max_staleness=1", *JOIN)),
    "llm": Run(TEXT, 8, (*COMMON, "checkpoint.asynchronous=true", "plugins=[tests]")),
    "ray": Run(IMAGES, 8, (*COMMON, "scale=toy", "num_devices=2", *RAY)),
    "ray_ahead": Run(AHEAD, 8, (*COMMON, "scale=toy", "asynchronous.max_staleness=2", *RAY)),
    "ray_elastic": Run(AHEAD, 8, (*COMMON, "scale=toy", "asynchronous.max_staleness=1", *JOIN, *RAY)),
    "service": Run(SERVICE_REWARD, 8, (*COMMON, "scale=toy", "reward_parts=2")),
}
SERVICE = {"rewards": [{"name": "brightness", "scorer": "brightness", "num_threads": 1, "device": "cpu"}]}
FULL = 7
"""The exit status of a run that ends by a full disk."""


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of a run: its kind, its moment, and how the process of the run ended."""

    kind: str
    victim: str
    """driver, worker or service."""
    after_steps: int
    hit: bool
    """False if the run had ended before."""
    status: int
    """Exit status; -9 after SIGKILL."""


def kill(pid: int, choice: random.Random) -> None:
    os.kill(pid, signal.SIGKILL)


def pause(pid: int, choice: random.Random) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(choice.uniform(0.2, 3.0))
    os.kill(pid, signal.SIGCONT)


def pause_and_kill(pid: int, choice: random.Random) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(choice.uniform(0.2, 3.0))
    os.kill(pid, signal.SIGKILL)


def fill_disk(pid: int, choice: random.Random) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (choice.randint(100, 30_000), hard))


def shift_clock(pid: int, choice: random.Random) -> None:
    jump_clock(pid, choice.choice([-1, 1]) * choice.choice([1, 60, 3600, 86_400]))


KINDS: dict[str, Callable[[int, random.Random], None]] = {
    "kill": kill,
    "pause": pause,
    "pause and kill": pause_and_kill,
    "full disk": fill_disk,
    "clock jump": shift_clock,
}
OF_OTHERS = ("kill", "pause", "pause and kill")
"""The disturbances of workers and of the reward service."""


def disturb(run: Run, folder: Path, choice: random.Random, mode: str, service: RunningService | None) -> Disturbance:
    """Begins or continues a run, disturbs it once, and waits for the end of its process."""
    child = begin(run.recipe, folder, *run.overrides, f"num_rollouts={run.num_steps}", own_session=True)
    victim = choice.choice(
        ["driver", "worker" if mode.startswith("ray") else "service" if mode == "service" else "driver"]
    )
    kind = choice.choice(list(KINDS) if victim == "driver" else OF_OTHERS)
    when = moment(folder, run.num_steps, choice)
    while child.is_alive() and not when():
        time.sleep(0.01)
    workers = workers_of(child) if victim == "worker" else []
    if victim == "worker" and not workers:
        victim = "driver"
    steps = steps_in(folder)
    hit = child.is_alive()
    if hit:
        pids = {"driver": child.pid, "worker": choice.choice(workers or [0]), "service": service.pid if service else 0}
        with suppress(ProcessLookupError):
            KINDS[kind](pids[victim], choice)
        if victim == "service" and kind != "pause":
            assert service is not None
            service.kill()
            service.start()
    child.join(600)
    status = child.exitcode
    if status is None:
        child.kill()
        raise RuntimeError(f"a run that was disturbed by {kind} did not end: {said(folder)}")
    expected = (0, -signal.SIGKILL, *([FULL] if kind == "full disk" else []))
    if status not in expected:
        raise RuntimeError(f"a run that was disturbed by {kind} ended with status {status}: {said(folder)}")
    return Disturbance(kind, victim, steps, hit, status)


def moment(folder: Path, num_steps: int, choice: random.Random) -> Callable[[], bool]:
    """A moment in the start of a process (a fifth of all), or up to 1.5 seconds after a step."""
    if choice.random() < 0.2:
        return after_seconds(choice.uniform(0.0, 5.0))
    return after_step(folder, choice.randrange(num_steps), choice.uniform(0.0, 1.5))


def workers_of(child: ForkServerProcess) -> list[int]:
    """The processes of the Ray workers of a run, which has a session of its own."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == child.pid and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                pids.append(int(entry.name))
        except OSError:
            continue  # the process ended meanwhile
    return sorted(pids)


@contextmanager
def run_of(mode: str) -> Iterator[tuple[Run, RunningService | None]]:
    """The run of a mode, and the reward service that scores its samples, if it has one."""
    run = MODES[mode]
    if mode != "service":
        yield run, None
        return
    with RunningService(SERVICE) as service:
        config = f"{{base_url: {service.url!r}, required_rewards: [brightness]}}"
        yield replace(run, overrides=(*run.overrides, f"reward.backend.config={config}")), service


def trial(mode: str, number: int, seed: int, unkilled: Unkilled, scratch: Path) -> dict[str, object]:
    """The record of one run that was disturbed, resumed and compared."""
    choice = random.Random(f"{seed} {mode} {number}")
    folder = scratch / f"{mode}-{number}"
    done: list[Disturbance] = []
    try:
        with run_of(mode) as (run, service):
            for _ in range(choice.randint(1, 3)):
                done.append(disturb(run, folder, choice, mode, service))
                if done[-1].status == 0:
                    break
            result = run.finish(folder)
        differs = [name for name, value in unkilled.outcome.items() if result[name] != value]
    except (RuntimeError, AssertionError) as error:
        text = str(error)
        differs = [f"failed: {text[:200]} ... {text[-1000:]}"]
    record = {
        "mode": mode,
        "trial": number,
        "commit": commit(),
        "disturbances": [asdict(each) for each in done],
        "differs_in": differs,
    }
    print(json.dumps(record | {"equal": not differs}), flush=True)
    return record | {"equal": not differs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--trials", type=int, default=50, help="trials of each mode (default 50)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after so many seconds")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = None if options.out is None else options.out.absolute()
    os.chdir(ROOT)
    known = json.loads(out.read_text())["trials"] if out is not None and out.exists() else []
    end = time.monotonic() + options.seconds
    records = list(known)
    for mode in options.modes:
        past = {record["trial"] for record in known if record["mode"] == mode}
        numbers = [number for number in range(options.trials) if number not in past]
        if numbers and time.monotonic() < end:
            for record in trials_of(mode, numbers, options.seed, options.jobs, end):
                records.append(record)
                write(records, options.seed, out)
    equal = sum(record["equal"] for record in records)
    print(f"{equal} of {len(records)} runs equal to the undisturbed one")
    return 0 if equal == len(records) else 1


def trials_of(mode: str, numbers: list[int], seed: int, jobs: int, end: float) -> Iterator[dict[str, object]]:
    """The records of the trials that could begin before `end`, as they end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(jobs) as pool:
        scratch = Path(folder)
        with run_of(mode) as (run, _):
            unkilled = Unkilled.of(run, scratch / "unkilled")

        def one(number: int) -> dict[str, object] | None:
            return trial(mode, number, seed, unkilled, scratch) if time.monotonic() < end else None

        for done in as_completed([pool.submit(one, number) for number in numbers]):
            record = done.result()
            if record is not None:
                yield record


@cache
def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def share_of(records: list[dict[str, object]]) -> str:
    return f"{sum(bool(record['equal']) for record in records)} of {len(records)}"


def write(records: list[dict[str, object]], seed: int, out: Path | None) -> None:
    if out is None:
        return
    modes = {mode: [record for record in records if record["mode"] == mode] for mode in MODES}
    report = {
        "disturbances_that_hit": sum(each["hit"] for record in records for each in record["disturbances"]),
        "equal": {mode: share_of(rows) for mode, rows in modes.items() if rows} | {"all": share_of(records)},
        "seed": seed,
        "date": str(date.today()),
        "settings": {mode: [*run.overrides, f"num_rollouts={run.num_steps}"] for mode, run in MODES.items()},
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "trials": records,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
