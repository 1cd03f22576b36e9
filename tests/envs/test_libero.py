"""The adapter of LIBERO against a package with the same interface, which records what it was asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from unirl.config.dependencies import is_installed
from unirl.config.errors import DependencyError, EpisodeError
from unirl.envs.libero import LiberoEnvironment, make_suite
from unirl.envs.slots import Slots, Source
from unirl.testing import check_environment
from unirl.types.environments import EpisodeStart

WORDS = ["open the drawer", "push the plate"]


class FakeSimulator:
    """The state is a number. An action adds its first entry; the task is solved from 1 on."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *, bddl_file_name: str, camera_heights: int, camera_widths: int) -> None:
        self.file, self.size, self.actions, self.closed = bddl_file_name, (camera_heights, camera_widths), [], False
        self.made.append(self)

    def seed(self, seed: int) -> None: ...

    def reset(self) -> None:
        self.actions = []

    def set_init_state(self, state: float) -> dict[str, Any]:
        self.state = state
        return self.observed()

    def observed(self) -> dict[str, Any]:
        image = np.zeros((*self.size, 3), np.uint8)
        image[0, 0] = int(100 * self.state)
        return {"agentview_image": image}

    def step(self, action: list[float]) -> tuple[Any, float, bool, dict[str, Any]]:
        assert isinstance(action, list) and len(action) == 7
        self.actions.append(action)
        self.state += action[0]
        return self.observed(), float(self.check_success()), self.check_success(), {}

    def check_success(self) -> bool:
        return self.state >= 1

    def close(self) -> None:
        self.closed = True


class FakeSuite:
    def get_num_tasks(self) -> int:
        return 2

    def get_task(self, number: int) -> Any:
        return SimpleNamespace(language=WORDS[number], problem_folder="folder", bddl_file=f"task{number}.bddl")

    def get_task_init_states(self, number: int) -> Any:
        return np.array([0.1, 0.2, 0.3]) + 0.5 * number


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    inner: Any = ModuleType("libero.libero")
    inner.get_libero_path = lambda name: f"/libero/{name}"
    inner.benchmark = SimpleNamespace(get_benchmark_dict=lambda: {"libero_spatial": FakeSuite})
    envs: Any = ModuleType("libero.libero.envs")
    envs.OffScreenRenderEnv = FakeSimulator
    modules = {"libero": ModuleType("libero"), "libero.libero": inner, "libero.libero.envs": envs}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    FakeSimulator.made.clear()
    yield FakeSimulator.made


def environment(**settings: Any) -> Any:
    given = {"camera": "agentview", "size": (4, 6), "settle": 2, "openvla_gripper": False, **settings}
    return make_suite("libero_spatial", render_mode=None, **given)


def test_task_and_seed_choose_file_and_initial_state(package: list[Any]) -> None:
    env = environment()
    image = env.reset(seed=4, options={"task": WORDS[1]})[0]["agentview"]
    assert package[0].file == "/libero/bddl_files/folder/task1.bddl" and package[0].size == (4, 6)
    assert image[3, 5].tolist() == [70, 70, 70] and image[0, 0].tolist() == [0, 0, 0]  # 0.2 + 0.5, turned
    assert package[0].actions == 2 * [[0.0] * 6 + [-1.0]]
    env.reset(seed=5, options={"task": WORDS[1]})
    assert len(package) == 1
    env.reset(seed=0, options={"task": WORDS[0]})
    assert len(package) == 2 and package[0].closed and package[1].file.endswith("task0.bddl")


def test_success_ends_an_episode_and_the_gripper_of_openvla_is_turned(package: list[Any]) -> None:
    env = environment(openvla_gripper=True)
    env.reset(seed=0, options={"task": WORDS[0]})
    action = np.array([0.5, 0, 0, 0, 0, 0, 0.9], np.float32)
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
    action[-1] = 0.1
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info) == (1.0, True, False, {"success": True})
    assert [given[-1] for given in package[0].actions[2:]] == [-1.0, 1.0]


def test_a_task_of_another_suite_is_named(package: list[Any]) -> None:
    given = {"camera": "agentview", "size": (4, 6), "settle": 0, "openvla_gripper": False}
    source = Source(id="libero_spatial", maker="unirl.envs.libero:make_suite", kwargs=given)
    _, failures = Slots(source, source.make()).reset([0], [1], [{"task": "fly"}])
    assert "the task 'fly' is none of libero_spatial, which has open the drawer, push the plate" in failures[0]


def test_the_stand_in_keeps_the_contract_and_a_missing_package_is_named() -> None:
    check_environment(LiberoEnvironment(suite="toy", image_size=(24, 24)))
    stand_in = LiberoEnvironment(suite="toy", image_size=(24, 24))
    start = EpisodeStart(seed=1, task="reach the red disc")
    assert stand_in.reset([0], [start])["agentview"].dtype == torch.uint8
    with pytest.raises(EpisodeError, match="must name one target"):
        stand_in.reset([0], [EpisodeStart(seed=1, task="fly")])
    if not is_installed("libero"):
        with pytest.raises(DependencyError, match=r"needs libero, not installed here: pip install git\+https"):
            LiberoEnvironment(suite="libero_spatial")
