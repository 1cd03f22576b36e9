"""Where time and memory go."""

from __future__ import annotations

import time

import pytest

from unirl.tracking.timing import PhaseTimers, peak_memory


def test_phases_add_up_and_are_taken_once():
    timers = PhaseTimers()
    with timers.phase("step"):
        for _ in range(2):
            with timers.phase("generate"):
                time.sleep(0.01)
    taken = timers.take()
    assert 0.02 <= taken["time/generate"] <= taken["time/step"] < 5
    assert timers.take() == {}


def test_phase_that_raises_is_timed_too():
    timers = PhaseTimers()
    with pytest.raises(ZeroDivisionError), timers.phase("reward"):
        raise ZeroDivisionError
    assert set(timers.take()) == {"time/reward"}


def test_peak_memory_sees_a_large_allocation():
    before = peak_memory()["mem/host_peak_gib"]
    block = bytearray(int((before + 0.2) * 2**30))
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory()["mem/host_peak_gib"] >= before + 0.15
