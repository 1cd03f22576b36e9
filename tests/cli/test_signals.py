"""The first signal asks for a stop, the second acts at once, and nothing stays behind."""

import os
import signal
import subprocess
import sys

import pytest

from unirl.cli.train import STOPPING, stop_on_signal
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
from unirl.cli.train import stop_on_signal
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


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with pytest.raises(ZeroDivisionError), stop_on_signal(lambda number: None):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOPPING] == before
