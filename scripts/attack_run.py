"""Attacks runs on this machine: their weights, their start, their secrets, their images, and their plugins.

    python scripts/attack_run.py --out benchmarks/attack_run.json                  about 4 minutes
    python scripts/attack_run.py signals images --trials 20

weights: one element of a random tensor becomes NaN, in a run or in a checkpoint on disk, and the run is continued
signals: SIGTERM, SIGUSR1 and SIGHUP at random moments between the first handler and the first step
secrets: a run gets secrets in four ways, and one of them is quoted by an error
images:  an EPS file, a FIFO, a redirect to a link-local address, sixteen PNG files of 67 megapixels at once
plugins: a recipe file names its own code, and is given to commands that check, plan, print and train

Each line of the output is one attack with the number of trials that it did not win. The exit status is 1 if it won one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from benchmarks.harness import machine  # noqa: E402
from benchmarks.reward_throughput import commit_of  # noqa: E402
from unirl.models.images import read_image  # noqa: E402
from unirl.train.backend.health import unhealthy  # noqa: E402
from unirl.train.backend.manifest import read_manifest, seal  # noqa: E402

MEMORY_RATIO = 3.0
"""Limit of the memory of sixteen large images that threads read at once, over that of one. It is above 1 because the
decoded image of one thread may still be there while the next one is decoded."""
RECIPE = "diffusion/sd3_trainside"
SECRETS = {"typed": "canary-typed-4f9a17c2", "named": "canary-named-4f9a17c2", "read": "canary-read-4f9a17c2"}
SECRETS |= {"header": "canary-header-4f9a17c2"}
CODE = "strange_code"
TEXT = f"from pathlib import Path\nPath(__file__).with_name('imported-{CODE}').touch()\n"


@dataclass
class AttackResult:
    """The outcome of the trials of one attack."""

    attack: str
    trials: int = 0
    held: int = 0
    """Number of trials that the attack did not win."""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    won: list[str] = field(default_factory=list)
    """One line for each trial that the attack won."""

    def note(self, held: bool, otherwise: str) -> None:
        self.trials += 1
        self.held += held
        if not held:
            self.won.append(otherwise)


def unirl(
    words: Sequence[str | Path], folder: Path, program: Sequence[str] = ("-m", "unirl.cli"), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, in `folder`, and returns the process with what it printed."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(folder / "settings"), **environ}
    command = [sys.executable, *program, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)


def toy_run(folder: Path, steps: int, *words: str) -> list[str]:
    return ["train", RECIPE, "scale=toy", f"num_rollouts={steps}", "save_interval=1", f"run.dir={folder}", *words]


SPOILED = """
import math, random, sys
from unirl.cli.main import main
from unirl.train.backend.fsdp import FSDPBackend
finish_step = FSDPBackend.finish_step
def spoiled(self):
    finish_step(self)
    shard = random.Random(int(sys.argv[1])).choice([each for each in self.shards.values() if each.numel()])
    self.optimizer.state[shard]["exp_avg_sq"].view(-1)[0] = math.nan
FSDPBackend.finish_step = spoiled
sys.exit(main(sys.argv[2:]))
"""
"""A training whose optimizer has one moment that is NaN after each step. The first argument is a seed."""


def attack_weights(result: AttackResult, place: Path, trials: int) -> None:
    begun = place / "begun"
    done = unirl(toy_run(begun, 2), place)
    if done.returncode:
        raise RuntimeError(done.stderr)
    for trial in range(trials):
        run = place / f"run-{trial}"
        shutil.copytree(begun, run)
        if trial % 2:
            unirl([str(trial), *toy_run(run, 3)], place, ("-c", SPOILED))
        else:
            spoil(run / "checkpoints" / "checkpoint-000002", trial)
        done = unirl(toy_run(run, 3), place)
        latest = (run / "checkpoints" / "LATEST").read_text().strip()
        bad = unhealthy(run / "checkpoints" / latest)
        held = done.returncode == 0 and latest == "checkpoint-000003" and not bad
        result.note(held, f"status {done.returncode}, {latest}, {bad}: {done.stderr[-300:]}")


def spoil(checkpoint: Path, seed: int) -> None:
    """Writes one NaN into a random tensor of a checkpoint, with a manifest that agrees."""
    files = {path: load_file(path) for path in sorted(checkpoint.rglob("*.safetensors"))}
    numbers = [(path, name) for path, tensors in files.items() for name in sorted(tensors) if tensors[name].numel()]
    path, name = random.Random(seed).choice([each for each in numbers if files[each[0]][each[1]].is_floating_point()])
    tensors = files[path]
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path)
    seal(checkpoint, read_manifest(checkpoint).step)


def attack_signals(result: AttackResult, place: Path, trials: int) -> None:
    draw = random.Random(0)
    for trial in range(trials):
        number = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)[trial % 3]
        run = place / f"run-{trial}"
        with open(place / f"log-{trial}", "w") as log:
            words = [sys.executable, "-m", "unirl.cli", *toy_run(run, 50)]
            child = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, preexec_fn=as_in_a_terminal)
            while not catches(child.pid):
                time.sleep(0.005)
            delay = draw.uniform(0.0, 8.0)
            time.sleep(delay)
            child.send_signal(number)
            try:
                status = child.wait(120)
            finally:
                child.kill()
        result.note(status == 75, f"{number.name} after {delay:.2f} s: status {status}")


def as_in_a_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def catches(pid: int) -> bool:
    """Returns whether a process has a handler of SIGTERM."""
    with suppress(OSError):
        [mask] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
    return False


def attack_secrets(result: AttackResult, place: Path, trials: int) -> None:
    block = "reward.backend"
    words = ["plugins=[tests]", f"{block}._target_=tests.cli.keyed_reward.KeyedRewardScorer"]
    words += [f"{block}.phrase={SECRETS['typed']}", f"{block}.api_key={SECRETS['named']}"]
    words += [f"{block}.address='${{oc.env:SERVICE_TOKEN}}'", f"{block}.header='Bearer {SECRETS['header']}'"]
    for fails in ([], [f"{block}.fails=true", "--debug"]):
        run = place / f"run-{len(fails)}"
        done = unirl(toy_run(run, 2, *words, *fails), place, SERVICE_TOKEN=SECRETS["read"])
        if bool(done.returncode) != bool(fails):
            raise RuntimeError(done.stderr)
        files = [path for path in run.rglob("*") if path.is_file()]
        written = {path.name: path.read_bytes() for path in files} | {"console": (done.stdout + done.stderr).encode()}
        result.figures["files"] = result.figures.get("files", 0) + len(files)
        for way, secret in SECRETS.items():
            where = [name for name, content in written.items() if secret.encode() in content]
            result.note(not where, f"{way}: {where}")


class Redirect(BaseHTTPRequestHandler):
    """Answers every request with a redirect to the address at which clouds give out credentials."""

    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def attack_images(result: AttackResult, place: Path, trials: int) -> None:
    written = BytesIO()
    Image.new("RGB", (64, 64), "red").save(written, "EPS")
    (place / "a.png").write_bytes(written.getvalue())
    os.mkfifo(place / "fifo.png")
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for uri in (f"{place}/a.png", f"{place}/fifo.png", f"http://127.0.0.1:{server.server_port}/a.png"):
            begun = time.monotonic()
            outcome = refusal(uri, place)
            took = time.monotonic() - begun
            refused = outcome.startswith("status 4: error[4002]")
            result.note(refused and took < 20.0, f"{uri}: {outcome} after {took:.1f} s")
        server.shutdown()
    Image.new("L", (8192, 8192)).save(place / "large.png", optimize=True)
    result.figures["file_kb"] = round((place / "large.png").stat().st_size / 1e3)
    peaks = []
    for number in (1, 16):
        reader = subprocess.Popen(
            [sys.executable, __file__, "--read", str(place / "large.png"), "--at-once", str(number)]
        )
        peak = 0.0
        while reader.poll() is None:
            peak = max(peak, resident_mb(reader.pid))
            time.sleep(0.005)
        if reader.returncode:
            raise RuntimeError(f"reading {number} images ended with status {reader.returncode}")
        peaks.append(round(peak, 1))
    result.figures |= {"one_mb": peaks[0], "sixteen_mb": peaks[1]}
    result.note(peaks[1] < MEMORY_RATIO * peaks[0], f"sixteen images took {peaks[1]} MB, and one takes {peaks[0]} MB")


def refusal(uri: str, place: Path) -> str:
    """The status and text of the error with which `unirl data check` refuses a prompt with this image."""
    reference = {"modality": "image", "role": "condition", "uri": uri}
    (place / "p.jsonl").write_text(json.dumps({"prompt": "a", "media_refs": [reference]}) + "\n")
    done = unirl(["data", "check", place / "p.jsonl"], place)
    return f"status {done.returncode}: {(done.stdout + done.stderr)[-400:]}"


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    pages = 0
    with suppress(OSError):
        children = [text for file in Path(f"/proc/{pid}/task").glob("*/children") for text in file.read_text().split()]
        for each in (pid, *children):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def read_at_once(path: str, number: int) -> None:
    """Reads one image in as many threads."""

    def read(_: int) -> None:
        read_image(path)

    with ThreadPoolExecutor(number) as threads:
        list(threads.map(read, range(number)))


def attack_plugins(result: AttackResult, place: Path, trials: int) -> None:
    (place / f"{CODE}.py").write_text(TEXT)
    recipe = f"defaults: [{RECIPE}, _self_]\nplugins: [{CODE}]\nreward: {{backend: {{_target_: {CODE}.Scorer}}}}\n"
    (place / "mine.yaml").write_text(recipe)
    commands = (["check"], ["plan"], ["config", "show"], ["train"], ["train", "--dry-run"], ["train", "--cfg", "job"])
    for verb in commands:
        done = unirl([*verb, "./mine.yaml"], place)
        imported = (place / f"imported-{CODE}").exists()
        printing = verb[-1] == "job"
        held = not imported and done.returncode == (0 if printing else 2)
        result.note(held, f"{' '.join(verb)}: status {done.returncode}, imported: {imported}")


ATTACKS: dict[str, Callable[[AttackResult, Path, int], None]] = {
    "weights": attack_weights,
    "signals": attack_signals,
    "secrets": attack_secrets,
    "images": attack_images,
    "plugins": attack_plugins,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", help=f"default: {' '.join(ATTACKS)}")
    parser.add_argument("--trials", type=int, default=6, help="trials of weights and of signals (default 6)")
    parser.add_argument("--out", type=Path, help="the JSON file for the figures")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        read_at_once(options.read, options.at_once)
        return 0
    results = []
    for name in options.attacks or ATTACKS:
        result, begun = AttackResult(name), time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            ATTACKS[name](result, Path(place), options.trials)
        result.seconds = round(time.monotonic() - begun, 1)
        results.append(result)
        print(
            f"{name}: {result.held} of {result.trials} held {result.figures or ''}", *result.won, sep="\n  ", flush=True
        )
    if options.out:
        content = {"commit": commit_of(ROOT), "machine": machine(), "attacks": [asdict(each) for each in results]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(each.held == each.trials for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
