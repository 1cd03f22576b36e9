"""What the tests of commands share."""

import signal

import pytest


@pytest.fixture
def signals_of_a_terminal():
    """SIGINT and SIGHUP as in a terminal, also where the tests run under nohup or in the background of a shell."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
