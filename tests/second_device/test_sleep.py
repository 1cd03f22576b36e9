"""Composed engines take turns on a device: the bytes on it are those of the engine that works, and of no other."""

import gc

import pytest

from benchmarks import composed
from unirl.testing.second_device import second_devices


@pytest.mark.slow
def test_the_engine_that_works_leaves_no_byte_of_the_other_on_the_device():
    with second_devices(count=1) as devices, composed.trainer_of("replica") as trainer:
        for track in ("ar", "diffusion", "ar"):
            modules = composed.engine_of(trainer, track).pipeline.bundle.modules.values()
            with trainer.phase("generate", track):
                gc.collect()
                assert devices.allocated[0] == composed.tensor_bytes(modules) > 0
        with trainer.phase("train", "diffusion"):
            gc.collect()
            # AdamW has no state before its first step.
            [learner] = [learner for learner in trainer.learners if learner.track == "diffusion"]
            policy = learner.backend.group.role_here("diffusion.backend").module
            assert devices.allocated[0] == composed.tensor_bytes([policy]) > 0
