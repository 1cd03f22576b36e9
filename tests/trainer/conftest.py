"""What tests of whole runs share: workers that are there already."""

from __future__ import annotations

import pytest


@pytest.fixture
def workers(ray_pool, monkeypatch):
    """Recipes with runtime=ray take of the session's four workers what they need."""

    from unirl.trainer import assemble

    open_pool = assemble.open_pool

    def pool_of(runtime: str, num_devices: int, **options):
        if runtime == "local":
            return open_pool(runtime, num_devices, **options)
        ray_pool.num_updates = options["num_updates"]
        ray_pool.row_transport = options["row_transport"]
        return ray_pool

    monkeypatch.setattr(assemble, "open_pool", pool_of)
    monkeypatch.setattr(ray_pool, "close", ray_pool.clear)  # the workers outlive the run
    yield ray_pool
    ray_pool.row_transport = "object_store"
    ray_pool.stack_dir = None
