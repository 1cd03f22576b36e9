"""The adapters of simulators against stand-ins with the calls of their packages, which record what they were asked.

The calls were read in mees/calvin_env (envs/play_table_env.py), habitat-lab (gym/gym_definitions.py), RoboTwin
(script/eval_policy.py), the documentation of OmniGibson's Environment, and scripts of Isaac Lab.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from unirl.config.errors import DependencyError, InvalidValueError
from unirl.envs import simulators
from unirl.envs.simulators import (
    BehaviorEnvironment,
    CalvinEnvironment,
    HabitatEnvironment,
    IsaacLabEnvironment,
    RoboTwinEnvironment,
    SimulatorEnvironment,
)
from unirl.types.environments import EpisodeStart

ADAPTERS = [CalvinEnvironment, HabitatEnvironment, IsaacLabEnvironment, BehaviorEnvironment, RoboTwinEnvironment]
STATE = {"state": "robot.place"}


class World:
    """A number that the seed sets and actions move; it is solved from 1000 on. `calls` has what it was asked."""

    step_lim = 50

    def __init__(self, tensors: bool = False) -> None:
        self.calls: list[Any] = []
        self.place, self.tensors, self.take_action_cnt = 0.0, tensors, 0
        self.unwrapped = SimpleNamespace(device="cpu")

    def seen(self) -> dict[str, Any]:
        rgb = np.full((4, 6, 4), int(self.place) % 256, np.uint8)
        place = np.array([self.place, 1.0])
        if self.tensors:
            return {"robot": {"place": torch.tensor(place)[None], "rgb": torch.from_numpy(rgb)[None]}}
        return {"robot": {"place": place, "rgb": rgb}}

    def begin(self, seed: int) -> dict[str, Any]:
        self.calls.append(("begin", seed))
        self.place, self.take_action_cnt = float(seed), 0
        return self.seen()

    def move(self, action: Any) -> bool:
        self.calls.append(("move", [round(float(x), 3) for x in np.asarray(action).reshape(-1)]))
        self.place += 1000 * float(np.asarray(action).reshape(-1)[0])
        self.take_action_cnt += 1
        return self.place >= 1000


class Calvin(World):
    def reset(self, robot_obs: Any = None, scene_obs: Any = None) -> Any:
        assert scene_obs == "scene"
        return self.begin(robot_obs)

    def get_info(self) -> Any:
        return {"place": self.place}

    def step(self, action: Any) -> Any:
        self.move(action)
        assert action[-1] in (-1.0, 1.0)
        return self.seen(), 0, False, self.get_info()

    def get_task_info_for_set(self, start: Any, now: Any, tasks: set[str]) -> set[str]:
        return tasks if now["place"] >= 1000 > start["place"] else set()

    def close(self) -> None:
        self.calls.append("close")


class Habitat(Calvin):
    def seed(self, seed: int) -> None:
        self.wanted = seed

    def reset(self) -> Any:  # type: ignore[override]
        return self.begin(self.wanted)

    def step(self, action: Any) -> Any:
        solved = self.move(action)
        return self.seen(), float(solved), solved, {"success": float(solved)}


class Isaac(Habitat):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return self.begin(seed or 0), {}

    def step(self, action: Any) -> Any:
        assert action.shape == (1, 3)
        solved = torch.tensor([self.move(action)])
        return self.seen(), solved.float(), solved, torch.tensor([False]), {"success": solved}


class Behavior(Habitat):
    def reset(self) -> Any:  # type: ignore[override]
        return self.begin(torch.initial_seed()), {}

    def step(self, action: Any) -> Any:
        solved = self.move(action)
        return self.seen(), float(solved), solved, False, {"done": {"success": solved}}


class RoboTwin(Habitat):
    def setup_demo(self, now_ep_num: int, seed: int, is_test: bool, **args: Any) -> None:
        assert is_test and args == {"camera": "D435"}
        self.begin(seed)

    def get_obs(self) -> Any:
        return self.seen()

    def take_action(self, action: Any, action_type: str) -> None:
        assert action_type == "qpos"
        self.eval_success = self.move(action)

    def close_env(self) -> None:
        self.calls.append("close")


def packages(world: Any, folder: Any) -> dict[str, Any]:
    """The modules that the adapters import, by name."""
    task = type("hammer", (), {"__new__": lambda cls: world})
    state = lambda condition: (condition["seed"], "scene")  # noqa: E731
    chains = [({"seed": 7 + number}, ["drawer", "lamp"]) for number in range(3)] + [({"seed": 0}, ["lamp"])]
    return {
        "calvin_env": {},
        "calvin_env.envs": {},
        "calvin_env.envs.play_table_env": {"get_env": lambda path, show_gui: world},
        "calvin_agent": {"__file__": str(folder / "a" / "b.py")},
        "calvin_agent.evaluation": {},
        "calvin_agent.evaluation.multistep_sequences": {"get_sequences": lambda count: chains},
        "calvin_agent.evaluation.utils": {"get_env_state_for_initial_condition": state},
        "hydra": {"utils": SimpleNamespace(instantiate=lambda config: world)},
        "habitat": {"get_config": lambda path: path},
        "habitat.gym": {},
        "habitat.gym.gym_definitions": {"make_gym_from_config": lambda config: world},
        "isaaclab": {},
        "isaaclab.app": {"AppLauncher": lambda headless, enable_cameras: None},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"parse_env_cfg": lambda task, num_envs: num_envs},
        "omnigibson": {"Environment": lambda configs: world if configs["task"]["activity_name"] == "drawer" else None},
        "envs": {},
        "envs.hammer": {"hammer": task},
    }


CASES: list[tuple[type[SimulatorEnvironment], World, str]] = [
    (CalvinEnvironment, Calvin(), "drawer"),
    (HabitatEnvironment, Habitat(), "pick"),
    (IsaacLabEnvironment, Isaac(tensors=True), "Isaac-Lift-v0"),
    (BehaviorEnvironment, Behavior(), "drawer"),
    (RoboTwinEnvironment, RoboTwin(), "hammer"),
]


@pytest.fixture
def opened(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A function that opens an adapter with its stand-in."""
    monkeypatch.setattr(simulators, "need", lambda *modules, **rest: None)
    tasks = tmp_path / "conf/callbacks/rollout/tasks"
    tasks.mkdir(parents=True)
    (tasks / "new_playtable_tasks.yaml").write_text("{}")
    (tmp_path / "settings.yaml").write_text("camera: D435")

    def open_it(kind: type[SimulatorEnvironment], world: World, task: str, **settings: Any) -> SimulatorEnvironment:
        world.calls.clear()
        for name, content in packages(world, tmp_path).items():
            module: Any = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(gymnasium.registry, "Isaac-Lift-v0", SimpleNamespace())
        if kind is IsaacLabEnvironment:
            monkeypatch.setattr(gymnasium, "make", lambda task, cfg: world)
        plain = {
            "observations": STATE | {"image": "robot.rgb"},
            "actions": 3,
            "config": str(tmp_path / "settings.yaml"),
        }
        given: dict[str, Any] = plain | settings
        return kind(task=task, max_steps=5, **given)

    return open_it


@pytest.mark.parametrize(("kind", "world", "task"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_seed_action_and_success_reach_the_simulator_and_back(opened: Any, kind: Any, world: World, task: str) -> None:
    env = opened(kind, world, task)
    assert env.spaces.observations == {"state": (2,), "image": (3, 4, 6)} and env.spaces.most_steps == 5
    assert not env.is_keyed
    first = env.reset([0], [EpisodeStart(seed=4)])
    begun = 7 + 4 % 3 if kind is CalvinEnvironment else 4
    assert first["state"].tolist() == [[begun, 1.0]] and first["image"].unique().tolist() == [begun]
    step = env.step([0], torch.tensor([[0.25, -1.0, 0.5]]))
    last = 1.0 if kind is CalvinEnvironment else 0.5  # the gripper of CALVIN is open or closed
    assert world.calls[-1] == ("move", [0.25, -1.0, last])
    assert step.observations["state"].tolist() == [[begun + 250.0, 1.0]]
    assert not (step.success | step.terminated | step.truncated).any()
    step = env.step([0], torch.tensor([[0.75, 0.0, 0.5]]))
    assert step.success.all() and step.terminated.all() and step.rewards.tolist() == [1.0] and not step.faults
    env.close()
    assert world.calls[-1] == "close"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_missing_simulator_is_named_with_its_installation(kind: Any) -> None:
    with pytest.raises(DependencyError, match=rf"{kind.__name__} \(task=x\) needs {kind.package}, .*") as error:
        kind(task="x", observations=STATE, actions=7)
    assert kind.install in str(error.value)


@pytest.mark.parametrize(
    ("number", "task", "says"),
    [(0, "window", "task=window is no task .* has drawer, lamp"), (2, "Isaac-X-v0", "task=Isaac-X-v0 .* Isaac-Lift-v0"),
     (4, "nail", r"task=nail is no task of RoboTwin: there is no file envs/nail\.py")],
)  # fmt: skip
def test_a_task_that_a_simulator_does_not_have_is_named(opened: Any, number: int, task: str, says: str) -> None:
    kind, world, _ = CASES[number]
    with pytest.raises(InvalidValueError, match=says):
        opened(kind, world, task)


def test_a_part_that_is_not_observed_is_named_with_those_that_are(opened: Any) -> None:
    with pytest.raises(KeyError, match=r"'robot\.pose' has no part 'pose'; there are place, rgb"):
        opened(*CASES[1], observations={"state": "robot.pose"})
