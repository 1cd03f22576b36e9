"""The first signal asks for a stop, the second acts at once, and nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import wait_until
from unirl.cli.signals import STOPPING, stop_on_signal, stoppable_start
from unirl.config.failures import Session
from unirl.tracking.console import Change, Console

pytestmark = pytest.mark.usefixtures("signals_of_a_terminal")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING, ids=lambda number: number.name)
def test_the_first_signal_asks_for_a_stop_and_the_run_goes_on(number, capsys):
    asked = []
    with stop_on_signal(asked.append):
        send(number)
    assert asked == [number]
    assert "finishing this step" in capsys.readouterr().err


SLOW_TO_END = """
import atexit, os, signal, time
from unirl.cli.signals import stop_on_signal
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(time.sleep, 600.0)
with stop_on_signal(lambda number: None):
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
    finally:
        time.sleep(600.0)
"""


def test_a_second_ctrl_c_ends_the_process_without_any_cleaning_up():
    ended = subprocess.run([sys.executable, "-c", SLOW_TO_END], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 128 + signal.SIGINT
    assert [line.partition(". ")[0] for line in ended.stderr.splitlines()] == [
        "unirl: SIGINT: finishing this step, then saving",
        "unirl: SIGINT: stopped at once, without saving",
    ]


@pytest.mark.parametrize("first", STOPPING, ids=lambda number: number.name)
def test_closing_the_terminal_is_never_the_second_signal(first):
    asked = []
    with stop_on_signal(asked.append):
        send(first)
        send(signal.SIGHUP)
        send(signal.SIGHUP)
    assert asked == [first]


def test_nohup_stays_in_effect():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = []
    try:
        with stop_on_signal(asked.append):
            send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == []


def test_a_signal_is_heard_where_nobody_reads_the_output(unread_stderr):
    asked = []
    with stop_on_signal(asked.append):
        send(signal.SIGHUP)
    assert asked == [signal.SIGHUP]


@pytest.fixture
def unread_stderr(monkeypatch):
    """Standard error is a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield stream
        monkeypatch.undo()


def test_a_console_that_nobody_reads_writes_its_log_alone(unread_stderr, tmp_path):
    console = Console(2, log=tmp_path / "console.log")
    console.banner("a run", [("stop", "Ctrl-C")])
    console.step(1, {"rollout/reward_mean": 0.5})
    console.summary("finished", [Change("eval/reward_mean", 0.25, 0.75)], [("run", "there")])
    console.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert lines[:2] == ["a run", "stop  Ctrl-C"]
    assert "step 1/2 reward=0.500" in lines[2]
    assert lines[3] == "finished" and "+0.500" in lines[5] and lines[-1] == "run  there"


HUNG = """
import ctypes, os, signal, threading
from unirl.cli.signals import STOPPING, stoppable_start
from unirl.config.failures import Session
from unirl.config.errors import StoppedAtStart
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with stoppable_start(Session(grace_s=0.1)):
    if {native}:  # a call of a native library, in which Python runs no handler
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.{name}]).start()
        ctypes.CDLL(None).sleep(600)
        ctypes.CDLL(None).sleep(600)
    finally:
        ctypes.CDLL(None).sleep(600)
"""


@pytest.mark.parametrize("native", [True, False], ids=["native-call", "cleaning-up"])
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGHUP", 75)])
def test_a_start_that_does_not_come_to_its_end_is_ended_after_the_grace_period(native, name, status):
    words = [sys.executable, "-c", HUNG.format(native=native, name=name)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ended.returncode == status
    assert f"unirl: {name}: not ended within 0.1 s; stopped at once" in ended.stderr


def test_a_signal_of_a_forked_process_does_not_end_its_parent():
    with stoppable_start(Session(grace_s=0.05)):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            send(signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)


TRAIN = ("-m", "unirl.cli", "train", "diffusion/sd3_trainside", "scale=toy", "num_rollouts=50", "save_interval=50")
CATCHES = 1 << (signal.SIGTERM - 1)


def catches(pid: int) -> bool:
    """True when the process has a handler of SIGTERM."""
    [mask] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) & CATCHES)


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def stopped_at(folder: Path, number: int, moment) -> tuple[int, str]:
    """Exit status and output of a run that gets a signal at a moment."""
    with open(f"{folder}.log", "w+") as log:
        words = [sys.executable, *TRAIN, f"run.dir={folder}"]
        child = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=terminal_signals)
        try:
            assert wait_until(lambda: child.poll() is not None or moment(child.pid), 120)
            child.send_signal(number)
            status = child.wait(120)
        finally:
            child.kill()
        return status, Path(log.name).read_text()


def terminal_signals() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_run_that_is_stopped_before_it_imports_its_libraries_ends_with_75(tmp_path):
    without_torch = []
    status, said = stopped_at(
        tmp_path / "run",
        signal.SIGTERM,
        lambda pid: catches(pid) and (without_torch.append(not has_torch(pid)) or True),
    )
    assert status == 75 and without_torch[0], said
    assert "SIGTERM: stopped while no step was running. Nothing is lost" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("SIGTERM", "handlers"),
        ("SIGUSR1", "handlers"),
        ("SIGHUP", "handlers"),
        ("SIGHUP", "imports"),
        ("SIGUSR1", "opened"),
        ("SIGTERM", "first-step"),
    ],
)
def test_a_run_that_is_stopped_at_any_moment_ends_with_75(name, moment, tmp_path):
    """All signals have the same handler, so each moment needs only one of them."""
    folder = tmp_path / "run"
    moments = {
        "handlers": catches,
        "imports": has_torch,
        "opened": lambda pid: (folder / "run.json").exists(),
        "first-step": lambda pid: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size,
    }
    status, said = stopped_at(folder, signal.Signals[name], moments[moment])
    assert status == 75 and "Traceback" not in said, said
    if (folder / "run.json").exists():
        assert json.loads((folder / "run.json").read_text())["exit"]["code"] == 75


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with pytest.raises(ZeroDivisionError), stop_on_signal(lambda number: None):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOPPING] == before
