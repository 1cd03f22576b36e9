"""How test.sh shares the tests between processes: a file stays together, and so do all files that need Ray.

Without `-n` nothing here has an effect: `python -m pytest tests/sde` runs in one process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

import pytest

MOST_WORKERS = 4
"""Of `-n auto`: a worker holds torch, and its tests start up to four processes of their own."""
NEED_RAY = (
    "tests/distributed/test_failures.py",
    "tests/distributed/test_rendezvous.py",
    "tests/distributed/test_runtimes.py",
    "tests/distributed/test_transfer_queue.py",
    "tests/distributed/test_transport.py",
    "tests/distributed/test_weight_sync_processes.py",
    "tests/trainer/test_bagel_runs.py",
    "tests/trainer/test_image_token_loop.py",
    "tests/trainer/test_nextstep1_run.py",
    "tests/trainer/test_refill.py",
    "tests/trainer/test_reward_failures.py",
    "tests/trainer/test_runtimes.py",
    "tests/trainer/test_stalls.py",
    "tests/trainer/test_text_loop.py",
    "tests/trainer/test_text_runtimes.py",
)
"""The files whose tests use the fixture ray_session, or one that stands on it."""
LONG = (
    "tests/trainer/test_kill_and_resume.py",
    "tests/models/test_families.py",
    "tests/trainer/test_loop.py",
    "tests/trainer/test_replica_loop.py",
    "tests/algorithms/test_learning.py",
    "tests/algorithms/test_ar_ppo_stack.py",
    "tests/algorithms/test_token_learning.py",
    "tests/train/test_sharding.py",
    "tests/test_recipes.py",
    "unirl-reward-service/tests/test_fire.py",
)
"""The files that take longest in the fast tier."""
LARGE_LIBRARY = 200
"""Number of modules whose import makes another `gc.freeze` worth its time."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since many tests wait; on a single core, the process that was started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS) if cores > 1 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """By file, and one Ray for all who need it: each further one takes seconds to start, and a GiB."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByFileAndRay(config, log)


class FailuresAtOnce:
    """Names each failed test when it has failed: a run of many minutes that is cut off has no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reporter.write_line(f"FAILED {report.nodeid} ({report.when})")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(reporter))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests are shared, the long groups begin first, so that no worker is left with one at the end."""
    unlisted = {file_of(item.nodeid) for item in items if needs_ray(item)} - set(NEED_RAY)
    if unlisted:
        raise pytest.UsageError(f"{sorted(unlisted)} use ray_session: add them to NEED_RAY in conftest.py")
    if hasattr(config, "workerinput"):
        slow = {file_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (group_of(item.nodeid) != "ray", file_of(item.nodeid) not in slow.union(LONG)))


class LoadedLibraries:
    """Exempts imported libraries from garbage collection, which would visit a million of their objects each time."""

    def __init__(self) -> None:
        self.num_modules = 0

    def keep(self) -> None:
        """Exempt every live object if many modules were imported since the last call that did so."""
        if len(sys.modules) > self.num_modules + LARGE_LIBRARY:
            gc.collect()
            gc.freeze()
            self.num_modules = len(sys.modules)


LOADED = LoadedLibraries()


def pytest_collection() -> None:
    """Pause garbage collection while tests are imported: these objects stay until the process ends."""
    gc.disable()


def pytest_collection_finish() -> None:
    LOADED.keep()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Exempts the libraries that a test imported, as it does when it builds a model."""
    yield
    LOADED.keep()


def group_of(nodeid: str) -> str:
    return "ray" if file_of(nodeid) in NEED_RAY else file_of(nodeid)


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def needs_ray(item: pytest.Item) -> bool:
    return "ray_session" in getattr(item, "fixturenames", ())
