"""The first signal asks for a stop, the second acts at once, and nothing stays behind."""

import os
import signal

import pytest

from unirl.cli.signals import STOPPING, stop_on_signal


@pytest.fixture(autouse=True)
def interruptible():
    """Python's own Ctrl-C, also where a shell started the tests in the background and so ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING, ids=lambda number: number.name)
def test_the_first_signal_asks_for_a_stop_and_the_run_goes_on(number, capsys):
    asked = []
    with stop_on_signal(asked.append):
        send(number)
    assert asked == [number]
    assert "finishing this step" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_at_once(capsys):
    asked = []
    with pytest.raises(KeyboardInterrupt), stop_on_signal(asked.append):
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert asked == [signal.SIGINT]


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in STOPPING]
    with pytest.raises(ZeroDivisionError), stop_on_signal(lambda number: None):
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOPPING] == before
