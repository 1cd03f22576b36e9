"""Replays mistakes of a user's first hour, and prints the exit status, the seconds and the message of each.

    python scripts/first_hour.py                  every case: less than a minute
    python scripts/first_hour.py plugin export    the cases whose names contain one of the words

Each case is one row of scripts/first_hour.yaml. It runs in an empty folder, in a process with all imports done. A
refusal is one message of at most 6 lines, without a traceback, and leaves nothing behind. The exit status is 1 if a
case is not answered as its row says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MAX_LINES = 6
SHOWN = 140
"""Characters of a message in the table."""
DEADLINE_S = 300.0
PRELOAD = (
    "unirl.cli.data",
    "unirl.cli.eval",
    "unirl.cli.export",
    "unirl.cli.reward",
    "unirl.cli.sample",
    "unirl.models.sd3.family",
    "unirl.train_diffusion",
    "unirl.train.backend.fsdp",
    "diffusers.loaders.peft",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "hydra.core.override_parser.overrides_parser",
    "peft",
    "torch._dynamo",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
)
"""Modules that are imported before the first case."""

TRAIN = "train diffusion/sd3_trainside scale=toy num_rollouts=1 evaluation.eval_steps=0"
CHECK = "check diffusion/sd3_trainside"
LINT = "reward lint -r leash.rewards.Leash --plugins leash"
PULL = "plugins=[leash] algorithm._target_=leash.losses.Pull"
SCORER = """\
import sys
from unirl.reward.base import RewardScorer, single

class Leash(RewardScorer):
    reads = ("images",)
    BODY
"""
MEAN = "request.images.mean(dim=(1, 2, 3))"
LOSS = """\
from dataclasses import dataclass
import torch
from unirl.algorithms.shared.denoising import DenoisingLoss
from unirl.types.results import Metric

BODY
"""
LOSS_CLASS = """\
@dataclass(frozen=True, kw_only=True)
class Pull(DenoisingLoss):
    width: float = 1e-3

    def old_quantities(self):
        return ("logp",)

    def policy_loss(self, new, rows, part, advantages, now):
        losses = -advantages * (new.logp - self.old_logp(new, rows, part)).exp()
        return RETURN
"""


@dataclass(frozen=True)
class Case:
    """One command, and the answer that it must get."""

    name: str
    command: str
    """In it {train}, {check} and {lint} are commands, {pull} has the settings of an own loss, {run} is a copy of a
    finished toy run, and {root} this checkout."""
    status: int
    rule: str
    """A regular expression that the output matches."""
    scorer: str = ""
    """The body of the class `leash.rewards.Leash`, a package in the folder of the case."""
    loss: str = ""
    """The text of the module `leash.losses` with the class `Pull`, or what its `policy_loss` returns."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are there before, by path."""
    times: int = 1
    """Number of times that the text of each file is repeated, for large files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    leaves: Sequence[str] = ()
    """New files and folders that may be there afterwards."""
    unread: bool = False
    """Nobody reads the output, as after `| head`."""
    signals: Sequence[str] = ()
    """Sent one after the other, such as HUP for a terminal that is closed."""
    signals_at: str = ""
    """They are sent when this file has content."""
    signals_after_s: float = 0.0
    """Seconds between that moment and the first one, for a signal in the middle of a step."""
    damaged: str = ""
    """A pattern of files in which one byte is changed before."""

    @property
    def all_files(self) -> dict[str, str]:
        """The text of every file that is there before, by path."""
        text = SCORER.replace("BODY", self.scorer.replace("{mean}", MEAN))
        own = {"leash/rewards.py": text} if self.scorer else {}
        if self.loss:
            body = self.loss if "class Pull" in self.loss else LOSS_CLASS.replace("RETURN", self.loss)
            own |= {"leash/losses.py": LOSS.replace("BODY", body)}
        package = {"leash/__init__.py": "", **own} if own else {}
        return {name: text * self.times for name, text in self.files.items()} | package

    def words(self, run: str) -> list[str]:
        """The arguments of `unirl`, with the toy run in the folder `run`."""
        spelled = self.command.format(train=TRAIN, check=CHECK, lint=LINT, pull=PULL, run=shlex.quote(run), root=ROOT)
        return shlex.split(spelled)


def read_cases() -> list[Case]:
    """The rows of scripts/first_hour.yaml."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return [Case(**row) for row in rows]


@dataclass(frozen=True)
class Answer:
    """The outcome of a command."""

    status: int
    seconds: float
    output: str
    left: frozenset[str]
    """New files and folders."""

    @property
    def message(self) -> str:
        """The output from the first error on; all of it if there is no error."""
        lines = self.output.rstrip().splitlines()
        ends = ("error[", "unirl: stopped", "unirl: interrupted", "unirl: SIGINT: stopped")
        first = next((number for number, line in enumerate(lines) if line.startswith(ends)), 0)
        return "\n".join(lines[first:])


def main(words: Sequence[str]) -> int:
    """Runs the cases whose names contain one of `words`, or all, and prints the table. Returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, here and in every command
    for name in PRELOAD:
        import_module(name)
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        run = Path(place, "run")
        made = replay(Case("", f"{{train}} num_rollouts=2 run.dir={run}", 0, ""), Path(place, "made"), run)
        assert made.status == 0, made.output
        for number, case in enumerate(read_cases()):
            if words and not any(word in case.name for word in words):
                continue
            answer = replay(case, Path(place, str(number)), run)
            wrong = problems(case, answer)
            failed += bool(wrong)
            first = next(iter(answer.message.splitlines()), "")[:SHOWN]
            mark = "BAD" if wrong else "ok"
            print(f"{mark:<4}{case.name:<36}{answer.status:>4} {answer.seconds:5.1f} s  {first}")
            for line in [*wrong, *answer.output.splitlines()] if wrong else ():
                print(f"        {line}")
    print(f"{failed} cases are not answered as their rows say")
    return int(failed > 0)


def replay(case: Case, folder: Path, run: Path) -> Answer:
    """Runs a case in `folder`, which is created."""
    folder.mkdir()
    if "{run}" in case.command:
        shutil.copytree(run, folder / "run")
    for name, text in case.all_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for file in folder.glob(case.damaged) if case.damaged else ():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    before = {path.name for path in folder.iterdir()}
    words = case.words("run")
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        run_here(words, folder, case)
    signals = [signal.Signals[f"SIG{name}"] for name in case.signals]
    status = wait_for(pid, signals, folder / case.signals_at, case.signals_after_s)
    seconds = time.monotonic() - begun
    output = output_of(folder).read_text(encoding="utf-8", errors="replace") if output_of(folder).exists() else ""
    return Answer(status, seconds, output, frozenset({path.name for path in folder.iterdir()} - before))


def output_of(folder: Path) -> Path:
    """The file with the output of the case in `folder`."""
    return folder.with_suffix(".output")


def run_here(words: Sequence[str], folder: Path, case: Case) -> None:
    """Runs `unirl <words>` in this process, which then ends."""
    from unirl.cli.main import main as unirl

    status = 70
    try:
        os.chdir(folder)
        os.environ.update(case.environment)
        reader, writer = os.pipe()
        os.close(reader)
        stream = writer if case.unread else os.open(output_of(folder), os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        encoding = case.environment.get("PYTHONIOENCODING", "utf-8")
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding=encoding, closefd=False) for number in (1, 2))
        status = unirl(list(words))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait_for(pid: int, signals: Sequence[signal.Signals], at: Path, after_s: float) -> int:
    """The exit status of a process, negative for the signal that ended it. It is killed after DEADLINE_S.

    Args:
        signals: sent `after_s` seconds after the file `at` has content, and then 0.1 s apart.
    """
    end = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if signals and at.is_file() and at.stat().st_size:
            time.sleep(after_s)
            os.kill(pid, signals[0])
            signals, after_s = signals[1:], 0.1
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def problems(case: Case, answer: Answer) -> list[str]:
    """The ways in which an answer breaks the row of its case."""
    wrong = []
    if answer.status != case.status:
        wrong.append(f"its exit status is {answer.status}, not {case.status}")
    if not re.search(case.rule, answer.output):
        wrong.append(f"its output does not match {case.rule!r}")
    if case.status > 0 and len(answer.message.splitlines()) > MAX_LINES:
        wrong.append(f"its message has more than {MAX_LINES} lines")
    if "Traceback" in answer.output or "error[1001]" in answer.output:
        wrong.append("it is called a bug of UniRL")
    if answer.left - set(case.leaves):
        wrong.append(f"it leaves {', '.join(sorted(answer.left - set(case.leaves)))}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
