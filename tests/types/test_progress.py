"""Imports are progress, once for each module. Nothing else that a call does in silence is."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from unirl.types import progress
from unirl.types.progress import Heartbeat, reporting_to

DEADLINE_S = 60.0


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of heartbeats, which stands still unless a test moves it."""
    state = SimpleNamespace(now=1000.0, longest=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


@pytest.fixture
def slow_package(tmp_path, monkeypatch, clock):
    """A package of six modules, each of which takes 50 s to load from a cold disk."""
    names = [f"slow_library_{time.monotonic_ns()}", *"abcde"]
    package = tmp_path / names[0]
    package.mkdir()
    for name, following in zip(names, [*names[1:], None], strict=True):
        body = "from tests.types.test_progress import take\ntake(50.0)\n"
        body += f"from {names[0]} import {following}\n" if following else ""
        (package / ("__init__.py" if name == names[0] else f"{name}.py")).write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    yield names[0]
    for name in [name for name in sys.modules if name.split(".")[0] == names[0]]:
        del sys.modules[name]


HOOK: list[SimpleNamespace] = []
"""The clock and the heartbeat that `take` uses."""


def take(seconds: float) -> None:
    """Let time pass, and note how long the call has been silent by then."""
    [state] = HOOK
    state.clock.now += seconds
    state.clock.longest = max(state.clock.longest, state.beat.silent_s)


@pytest.fixture
def beat(clock, monkeypatch) -> Heartbeat:
    heartbeat = Heartbeat()
    monkeypatch.setitem(sys.modules, "tests.types.test_progress", sys.modules[__name__])
    HOOK[:] = [SimpleNamespace(clock=clock, beat=heartbeat)]
    return heartbeat


def test_a_call_that_imports_for_minutes_is_never_silent_for_its_deadline(clock, beat, slow_package) -> None:
    with reporting_to(beat):
        importlib.import_module(slow_package)
    assert clock.now == 1300.0 and clock.longest < DEADLINE_S
    assert beat.what == f"import of {slow_package}.e"
    assert beat.status() == f"loading Python libraries (module {len(progress.IMPORTS.names)}), 50 s ago"


def test_a_busy_loop_is_silent_also_if_it_imports_the_same_modules_again(clock, beat, slow_package) -> None:
    with reporting_to(beat):
        importlib.import_module(slow_package)
        before = clock.now
        while clock.now < before + DEADLINE_S:
            take(1.0)
            importlib.import_module(slow_package)
            with pytest.raises(ImportError):
                importlib.import_module("no_such_library_at_all")
            if clock.now == before + 1.0:
                started = beat.at  # the first search for the missing module counts, and no later one
    assert beat.at == started and beat.silent_s == DEADLINE_S - 1.0


def test_imports_of_other_threads_and_outside_of_calls_are_no_progress_of_a_call(clock, beat, slow_package) -> None:
    with reporting_to(beat):
        last = beat.at
        other = threading.Thread(target=importlib.import_module, args=(slow_package,))
        other.start()
        other.join()
    assert beat.at == last and clock.now == 1300.0
    importlib.import_module("colorsys")
    assert beat.at == last


def test_a_process_of_one_worker_reports_what_ray_imports_before_a_call(beat, slow_package, monkeypatch) -> None:
    monkeypatch.setattr(progress.IMPORTS, "outside", None)
    progress.report_imports(outside=beat)
    importlib.import_module(slow_package)
    assert beat.what == f"import of {slow_package}.e"


def test_the_report_changes_no_import(beat) -> None:
    with reporting_to(beat):
        first, second = (list(map(type, sys.meta_path)) for _ in range(2))
        with reporting_to(beat):
            assert list(map(type, sys.meta_path)) == first == second
    assert sum(isinstance(finder, progress.ImportProgress) for finder in sys.meta_path) == 1
    assert importlib.util.find_spec("no_such_library_at_all") is None


def test_counts_go_on_from_chunk_to_chunk_with_their_rate_and_the_outer_one_first(clock) -> None:
    beat = Heartbeat()
    beat.begin("phase generate")
    for chunk in (8, 16):
        for _ in range(4):
            clock.now += 0.5
            beat.beat("denoising step", 4)
        beat.beat("sample", 24, chunk)
    assert beat.status() == "sample 16/24 (4/s), denoising step 4/4 (2/s)"
    clock.now += 0.5
    beat.beat("denoising step", 4)
    assert beat.status() == "sample 16/24 (4/s), denoising step 1/4 (2/s)"
    beat.begin("phase reward")
    assert beat.status() == "started" and beat.what == "phase reward"
    clock.now += 2.0
    assert beat.status() == "started, 2 s ago"


def test_a_total_of_one_has_a_rate_too(clock) -> None:
    beat = Heartbeat()
    for _ in range(3):
        clock.now += 4.0
        beat.beat("micro-batch", 1)
    assert beat.status() == "micro-batch 1/1 (0.25/s)"


def test_the_status_is_that_of_the_worker_which_is_waited_for_and_tells_uncounted_work_apart(clock) -> None:
    driver, worker = Heartbeat(), Heartbeat()
    worker.beat("sent tensor")
    worker.beat("sent tensor")
    with driver.waiting_for(worker):
        assert driver.status() == "sent tensor (2)"
    assert driver.status() == "nothing yet"
