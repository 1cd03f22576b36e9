"""What tests of several folders share: one Ray for the whole session, started when the first test needs it."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import shapes, warm_ray, warm_servers
from unirl.rollout.engine.serving import process

shapes.install(*shapes.ANNOTATED)

# How long an example takes is the machine's business: no claim of a test.
settings.register_profile("unirl", deadline=None)
settings.load_profile("unirl")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "runs that tests/trainer/test_kill_and_resume.py kills in the full tier (default 6)"
    parser.addoption("--kills", type=int, default=6, help=words)
    words = "seeds of the learning curves that are marked seeds (default 1)"
    parser.addoption("--seeds", type=int, default=1, help=words)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("seeds"):
        metafunc.parametrize("seed", range(1, metafunc.config.getoption("seeds") + 1))


@pytest.fixture(scope="session", autouse=True)
def _warm_servers() -> Iterator[None]:
    """Engines of this process start servers within milliseconds, unless a test puts `warm_servers.COLD` in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "spawn", warm_servers.spawn)
        yield


@pytest.fixture(scope="session", autouse=True)
def _memory_speed_disk() -> Iterator[None]:
    """Durability is not what a test can see; the order of the calls is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is taken to be there, for a test that stands in for its downloads."""
    monkeypatch.setattr("unirl.models.loading.hub.unreachable", lambda: None)


@pytest.fixture(scope="session")
def warm_ray_workers() -> Iterator[None]:
    """Ray clusters that this process and those of `processes.like_this` start have workers within milliseconds."""
    with warm_ray.warm_workers():
        yield


@pytest.fixture(scope="session")
def ray_session(warm_ray_workers) -> Iterator[None]:
    """Ray is up in this process, with room for several pools."""
    if " " in sys.executable:
        pytest.skip("Ray starts no workers from an interpreter whose path has a blank")
    from unirl.distributed.group.ray_cluster import connect, shut_down

    connect(num_cpus=16)
    yield
    shut_down()


@pytest.fixture(scope="session")
def shared_ray_pool(ray_session):
    """Four workers of the session, without libraries of models."""
    from unirl.distributed.group.ray_pool import RayPool

    pool = RayPool(4, deadline_s=600.0, preload=())
    pool.connect_s = 300.0
    yield pool
    pool.close()


@pytest.fixture
def ray_pool(shared_ray_pool):
    """The session's workers, without roles."""
    yield shared_ray_pool
    shared_ray_pool.clear()
