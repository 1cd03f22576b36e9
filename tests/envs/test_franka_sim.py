"""The adapter of franka_sim against a package with the same interface, whose cube rises with the hand."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unirl.config.dependencies import is_installed
from unirl.config.errors import DependencyError
from unirl.envs.franka_sim import LIFT, FrankaSimEnvironment
from unirl.envs.slots import Slots, Source


class FakePickCube:
    """Draws the place of the cube from numpy's global generator, as the package does."""

    def __init__(self, *, time_limit: float) -> None:
        self.model, self.place = None, np.zeros(3, np.float32)
        self.data = SimpleNamespace(
            sensor=lambda name: SimpleNamespace(data=self.place if name == "block_pos" else None)
        )

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.place[:] = *np.random.uniform(0.25, 0.55, 2), 0.02
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place[2] += action[2] * 0.1
        return self.seen(), 0.5, False, False, {}

    def seen(self) -> dict[str, Any]:
        zeros = np.zeros(3, np.float32)
        arm = {"panda/tcp_pos": zeros, "panda/tcp_vel": zeros, "panda/gripper_pos": np.array(0.0, np.float32)}
        return {"state": arm | {"block_pos": self.place.copy()}}

    def close(self) -> None: ...


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    envs: Any = ModuleType("franka_sim.envs")
    envs.PandaPickCubeGymEnv = FakePickCube
    monkeypatch.setitem(sys.modules, "franka_sim", ModuleType("franka_sim"))
    monkeypatch.setitem(sys.modules, "franka_sim.envs", envs)
    source = Source(id="PandaPickCube", maker="unirl.envs.franka_sim:make_pick_cube", max_steps=9)
    return Slots(source, source.make())


def test_equal_seeds_place_the_cube_alike_and_leave_numpys_generator_as_it_was(slots: Slots) -> None:
    before = np.random.get_state()[1].copy()
    seen, _ = slots.reset([0, 1, 2], [2**40 + 7, 2**40 + 7, 8], [{}, {}, {}])
    assert np.array_equal(np.random.get_state()[1], before)
    cubes = seen["state.block_pos"]
    assert np.array_equal(cubes[0], cubes[1]) and not np.array_equal(cubes[0], cubes[2])


def test_a_lift_of_20_cm_is_a_success_that_does_not_end_the_episode(slots: Slots) -> None:
    slots.reset([0], [1], [{}])
    up = np.array([[0.0, 0.0, 0.9, 0.0]], np.float32)
    steps = [slots.step([0], up) for _ in range(3)]
    assert LIFT == 0.2 and [int(step.success[0]) for step in steps] == [0, 0, 1]
    assert not any(step.ends.any() for step in steps)


def test_a_missing_package_is_named_with_its_command() -> None:
    if not is_installed("franka_sim"):
        with pytest.raises(DependencyError, match=r"needs franka_sim, not installed here: pip install 'git\+https"):
            FrankaSimEnvironment()
