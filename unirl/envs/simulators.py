"""CALVIN, Habitat, Isaac Lab, BEHAVIOR and RoboTwin: simulators that a machine must be set up for.

The adapters follow the public interfaces of these packages. They never ran with the packages themselves, and are tested
against stand-ins with the same calls. What the packages have in common is `Simulator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from unirl.config.dependencies import need
from unirl.config.errors import InvalidValueError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.slots import Source
from unirl.envs.spaces import Array

if TYPE_CHECKING:
    import gymnasium

Outcome = tuple[Any, float, bool, bool, bool | None]
"""An observation, a reward, and whether the episode terminated, was truncated, and succeeded (None: not reported)."""


class SimulatorEnvironment(GymnasiumEnvironment):
    """Base of the adapters: a task, the parts of its observation that are shown, and actions [A].

    The physics of these simulators do not promise equal bits, so the run's determinism class is `statistical`.
    """

    package: ClassVar[str]
    install: ClassVar[str]
    """The command that installs the package, or the page that explains it."""
    maker: ClassVar[str]

    def __init__(
        self,
        *,
        task: str,
        observations: Mapping[str, str],
        actions: Annotated[int, msgspec.Meta(ge=1)],
        config: str = "",
        success: str = "success",
        max_steps: Annotated[int, msgspec.Meta(ge=1)] = 300,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0,
    ) -> None:
        """
        Args:
            task: name of the task, as the simulator has it.
            observations: keys of the policy -> the way to a part of the simulator's observation, its keys joined by
                dots.
            actions: numbers of an action, each in [-1, 1].
            config: the file or folder that describes the simulation, where a simulator needs one.
            success: name of the entry that reports success, where a simulator has several.
            max_steps: number of steps after which an episode is truncated.
            workers: number of processes that share the slots. 0: all environments are in this process.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.

        Raises:
            DependencyError: 3001, the simulator is not installed.
        """
        need(self.package, by=f"{type(self).__name__} (task={task})", install=self.install)
        need("gymnasium", by=type(self).__name__, extra="embodied")
        given = {"observations": dict(observations), "actions": actions, "config": config, "success": success}
        maker = f"{type(self).__module__}:{self.maker}"
        self._open(Source(id=task, kwargs=given, maker=maker, max_steps=max_steps), workers, timeout_s)
        self.is_keyed = False


class CalvinEnvironment(SimulatorEnvironment):
    """A task of CALVIN, such as `open_drawer`; `config` is the folder of a data set, which describes the scene.

    Actions [7] are relative. The seed chooses one of the initial states that CALVIN's own evaluation draws for chains
    that begin with the task. The reward is 1 where the task oracle says that it is solved.
    """

    package: ClassVar[str] = "calvin_env"
    install: ClassVar[str] = (
        "git clone --recurse-submodules https://github.com/mees/calvin && cd calvin && sh install.sh"
    )
    maker: ClassVar[str] = "make_calvin"


class HabitatEnvironment(SimulatorEnvironment):
    """A task of Habitat 3: `config` is a file such as `benchmark/rearrange/skills/pick.yaml`."""

    package: ClassVar[str] = "habitat"
    install: ClassVar[str] = "conda install habitat-sim -c conda-forge -c aihabitat && pip install habitat-lab"
    maker: ClassVar[str] = "make_habitat"


class IsaacLabEnvironment(SimulatorEnvironment):
    """A task of Isaac Lab, such as `Isaac-Lift-Cube-Franka-v0`, one environment for each worker process.

    Isaac Lab starts the next episode within the last step of one, so the last observation of an episode is the first
    of the next; values after a cut are those of another state.
    """

    package: ClassVar[str] = "isaaclab"
    install: ClassVar[str] = "pip install 'isaaclab[isaacsim,all]' --extra-index-url https://pypi.nvidia.com"
    maker: ClassVar[str] = "make_isaac_lab"


class BehaviorEnvironment(SimulatorEnvironment):
    """An activity of BEHAVIOR-1K in OmniGibson: `config` is a YAML file of an environment, whose activity is `task`."""

    package: ClassVar[str] = "omnigibson"
    install: ClassVar[str] = (
        "git clone https://github.com/StanfordVL/BEHAVIOR-1K && cd BEHAVIOR-1K && ./setup.sh --omnigibson"
    )
    maker: ClassVar[str] = "make_behavior"


class RoboTwinEnvironment(SimulatorEnvironment):
    """A task of RoboTwin 2, such as `beat_block_hammer`, run from its folder; `config` is a YAML file of all arguments
    of `setup_demo`. Actions are joint positions.
    """

    package: ClassVar[str] = "envs"
    install: ClassVar[str] = (
        "git clone https://github.com/RoboTwin-Platform/RoboTwin, follow its page, and start the run there"
    )
    maker: ClassVar[str] = "make_robotwin"


def simulator(
    start: Callable[[int], Any],
    act: Callable[[Array], Outcome],
    close: Callable[[], object],
    observations: Mapping[str, str],
    actions: int,
) -> gymnasium.Env[Any, Any]:
    """An environment of Gymnasium around the functions of a simulator. Its spaces are learned from a first episode."""
    import gymnasium
    from gymnasium import spaces

    def seen(observation: Any) -> dict[str, Array]:
        return {key: part(observation, way) for key, way in observations.items()}

    first = seen(start(0))

    class Simulator(gymnasium.Env[Any, Any]):
        """Shows the parts of the observation that the recipe names."""

        observation_space = spaces.Dict({key: box_of(values) for key, values in first.items()})
        action_space = spaces.Box(-1.0, 1.0, (actions,), np.float32)

        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            return seen(start((seed or 0) % 2**31)), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, success = act(np.asarray(action, np.float32))
            info = {} if success is None else {"success": success}
            return seen(observation), reward, terminated, truncated, info

        def close(self) -> None:
            close()

    return Simulator()


def part(observation: Any, way: str) -> Array:
    """A part of a nested observation as an array: uint8 images [H, W, 3], or float32 numbers.

    Raises:
        KeyError: there is no such part; the message has those that are there.
    """
    for key in way.split("."):
        if key not in observation:
            raise KeyError(f"observations: {way!r} has no part {key!r}; there are {', '.join(map(str, observation))}")
        observation = observation[key]
    values = observation.detach().cpu().numpy() if hasattr(observation, "detach") else np.asarray(observation)
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values[..., :3]) if values.ndim == 3 else values
    return values.astype(np.float32)


def box_of(values: Array) -> gymnasium.spaces.Box:
    """The space of such arrays."""
    from gymnasium import spaces

    low, high = (0, 255) if values.dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, values.shape, values.dtype.type)


def unknown(task: str, known: Sequence[str]) -> InvalidValueError:
    """The error (2004) for a task that a simulator does not have."""
    return InvalidValueError(
        f"pipeline.env.task={task} is no task of this simulator, which has {', '.join(sorted(known))}"
    )


def make_calvin(
    task: str, *, render_mode: str | None, observations: Mapping[str, str], actions: int, config: str, success: str
) -> gymnasium.Env[Any, Any]:
    """`get_env` of calvin_env, and the sequences and the task oracle of calvin_agent."""
    from pathlib import Path

    import calvin_agent
    import hydra
    from calvin_agent.evaluation.multistep_sequences import get_sequences
    from calvin_agent.evaluation.utils import get_env_state_for_initial_condition
    from calvin_env.envs.play_table_env import get_env
    from omegaconf import OmegaConf

    tasks = Path(calvin_agent.__file__).parents[1] / "conf/callbacks/rollout/tasks/new_playtable_tasks.yaml"
    oracle, env = hydra.utils.instantiate(OmegaConf.load(tasks)), get_env(config, show_gui=False)
    chains = [(state, chain[0]) for state, chain in get_sequences(1000)]
    states = [state for state, first in chains if first == task]
    if not states:
        raise unknown(task, list({first for _, first in chains}))
    info: dict[str, Any] = {}

    def start(seed: int) -> Any:
        robot, scene = get_env_state_for_initial_condition(states[seed % len(states)])
        observation = env.reset(robot_obs=robot, scene_obs=scene)
        info["start"] = env.get_info()
        return observation

    def act(action: Array) -> Outcome:
        given = action.copy()
        given[-1] = 1.0 if given[-1] > 0 else -1.0  # the gripper is open or closed
        observation, _, _, now = env.step(given)
        solved = bool(oracle.get_task_info_for_set(info["start"], now, {task}))
        return observation, float(solved), solved, False, solved

    return simulator(start, act, env.close, observations, actions)


def make_habitat(
    task: str, *, render_mode: str | None, observations: Mapping[str, str], actions: int, config: str, success: str
) -> gymnasium.Env[Any, Any]:
    """`make_gym_from_config` of habitat-lab, which has the interface of gym 0.2x: four values of a step."""
    import habitat
    from habitat.gym.gym_definitions import make_gym_from_config

    env = make_gym_from_config(habitat.get_config(config))

    def start(seed: int) -> Any:
        env.seed(seed)
        return env.reset()

    def act(action: Array) -> Outcome:
        observation, reward, done, info = env.step(action)
        solved = info.get(success)
        return observation, float(reward), bool(done), False, None if solved is None else bool(solved)

    return simulator(start, act, env.close, observations, actions)


def make_isaac_lab(
    task: str, *, render_mode: str | None, observations: Mapping[str, str], actions: int, config: str, success: str
) -> gymnasium.Env[Any, Any]:
    """One environment of a task of Isaac Lab. Its application must start before anything else of it is imported."""
    from isaaclab.app import AppLauncher

    AppLauncher(headless=True, enable_cameras=True)
    import gymnasium
    import isaaclab_tasks  # noqa: F401 - registers the tasks
    import torch
    from isaaclab_tasks.utils import parse_env_cfg

    if task not in gymnasium.registry:
        raise unknown(task, [name for name in gymnasium.registry if name.startswith("Isaac-")])
    env: Any = gymnasium.make(task, cfg=parse_env_cfg(task, num_envs=1))

    def first(observation: Any) -> Any:
        if isinstance(observation, Mapping):
            return {key: first(value) for key, value in observation.items()}
        return observation[0]

    def start(seed: int) -> Any:
        return first(env.reset(seed=seed)[0])

    def act(action: Array) -> Outcome:
        given = torch.from_numpy(action)[None].to(env.unwrapped.device)
        observation, reward, terminated, truncated, info = env.step(given)
        solved = bool(torch.as_tensor(info[success]).any()) if success in info else None
        return first(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), solved

    return simulator(start, act, env.close, observations, actions)


def make_behavior(
    task: str, *, render_mode: str | None, observations: Mapping[str, str], actions: int, config: str, success: str
) -> gymnasium.Env[Any, Any]:
    """`Environment` of OmniGibson with the activity in place of the one in the file."""
    import omnigibson
    import torch
    import yaml

    with open(config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    settings["task"] = {**settings.get("task", {}), "type": "BehaviorTask", "activity_name": task}
    env = omnigibson.Environment(configs=settings)

    def start(seed: int) -> Any:
        torch.manual_seed(seed)
        return env.reset()[0]

    def act(action: Array) -> Outcome:
        observation, reward, terminated, truncated, info = env.step(action)
        solved = bool(info["done"]["success"])
        return observation, float(reward), bool(terminated), bool(truncated), solved

    return simulator(start, act, env.close, observations, actions)


def make_robotwin(
    task: str, *, render_mode: str | None, observations: Mapping[str, str], actions: int, config: str, success: str
) -> gymnasium.Env[Any, Any]:
    """A task class of RoboTwin's folder `envs`, with `setup_demo` as its reset and `take_action` as its step."""
    from importlib import import_module

    import yaml

    try:
        env = getattr(import_module(f"envs.{task}"), task)()
    except ModuleNotFoundError as error:
        raise InvalidValueError(
            f"pipeline.env.task={task} is no task of RoboTwin: there is no file envs/{task}.py"
        ) from error
    with open(config, encoding="utf-8") as file:
        settings = yaml.safe_load(file)
    episodes: list[int] = []

    def start(seed: int) -> Any:
        if episodes:
            env.close_env()
        env.setup_demo(now_ep_num=len(episodes), seed=seed, is_test=True, **settings)
        episodes.append(seed)
        return env.get_obs()

    def act(action: Array) -> Outcome:
        env.take_action(action, action_type="qpos")
        solved = bool(env.eval_success)
        return env.get_obs(), float(solved), solved, env.take_action_cnt >= env.step_lim and not solved, solved

    return simulator(start, act, env.close_env, observations, actions)
