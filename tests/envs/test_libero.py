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
from unirl.config.errors import DependencyError
from unirl.envs.libero import LiberoEnvironment, axis_angle, make_suite
from unirl.envs.pixel_reach import stood_for
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
        return {
            "agentview_image": image,
            "robot0_eye_in_hand_image": 2 * image,
            "robot0_eef_pos": np.array([0.1, 0.2, self.state]),
            "robot0_eef_quat": np.array([0.0, 0.0, np.sin(0.3), np.cos(0.3)]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
        }

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
    plain = {"cameras": ("agentview",), "state": False, "size": (4, 6), "settle": 2, "openvla_gripper": False}
    given: dict[str, Any] = plain | settings
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


def test_the_wrist_camera_and_the_state_are_shown_on_request(package: list[Any]) -> None:
    env = environment(cameras=("agentview", "robot0_eye_in_hand"), state=True)
    seen = env.reset(seed=4, options={"task": WORDS[1]})[0]
    assert seen["robot0_eye_in_hand"][3, 5].tolist() == [140, 140, 140]
    assert seen["state"].dtype == np.float32 and env.observation_space.contains(seen)
    np.testing.assert_allclose(seen["state"], [0.1, 0.2, 0.7, 0, 0, 0.6, 0.04, -0.04], rtol=1e-6)
    assert set(environment().reset(seed=4, options={"task": WORDS[1]})[0]) == {"agentview"}


def test_a_rotation_is_its_axis_times_its_angle() -> None:
    """The matrix exponential of the cross product with the vector is the rotation matrix of the quaternion."""
    for seed in range(20):
        x, y, z, w = quaternion = torch.nn.functional.normalize(
            torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=0
        )
        rotation = torch.stack([
            torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)]),
            torch.stack([2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)]),
            torch.stack([2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]),
        ])  # fmt: skip
        a, b, c = axis_angle(quaternion.numpy())
        cross = torch.tensor([[0, -c, b], [c, 0, -a], [-b, a, 0]], dtype=torch.float64)
        torch.testing.assert_close(torch.linalg.matrix_exp(cross), rotation)
    assert axis_angle(np.array([0.0, 0.0, 0.0, 1.0])).tolist() == [0, 0, 0]


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
    given = {"cameras": ("agentview",), "state": False, "size": (4, 6), "settle": 0, "openvla_gripper": False}
    source = Source(id="libero_spatial", maker="unirl.envs.libero:make_suite", kwargs=given)
    _, failures = Slots(source, source.make()).reset([0], [1], [{"task": "fly"}])
    assert "the task 'fly' is none of libero_spatial, which has open the drawer, push the plate" in failures[0]


def test_the_stand_in_keeps_the_contract_and_a_missing_package_is_named() -> None:
    check_environment(LiberoEnvironment(suite="toy", image_size=(24, 24)))
    stand_in = LiberoEnvironment(suite="toy", image_size=(24, 24), wrist=True, state=True)
    check_environment(stand_in)
    seen = stand_in.reset([0, 1], [EpisodeStart(seed=1, task=task) for task in ("reach the red disc", WORDS[0])])
    assert seen["agentview"].dtype == torch.uint8 and torch.equal(seen["agentview"], seen["robot0_eye_in_hand"])
    assert seen["state"].shape == (2, 8) and seen["state"][0].count_nonzero() == 2
    after = stand_in.step([0, 1], torch.tensor([[1.0] + 6 * [0.0]] * 2)).observations["state"]
    torch.testing.assert_close(after, (seen["state"] + torch.tensor([0.25] + 7 * [0.0])).clamp(max=1))
    if not is_installed("libero"):
        with pytest.raises(DependencyError, match=r"needs libero, not installed here: pip install git\+https"):
            LiberoEnvironment(suite="libero_spatial")


def test_a_task_of_a_simulator_stands_for_one_of_the_targets() -> None:
    assert stood_for("reach the blue disc") == "reach the blue disc" and stood_for("") == ""
    assert {stood_for(word) for word in ("open", "push", "fly", "lift", "turn")} == {
        "reach the blue disc",
        "reach the red disc",
    }
