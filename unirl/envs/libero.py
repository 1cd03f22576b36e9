"""Tasks of LIBERO: a Panda arm at tables, images of cameras, an instruction in words. https://libero-project.github.io

This adapter follows the interface of the package and of OpenVLA's evaluation; it never ran with the package itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from unirl.config.dependencies import need
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.maniskill import STAND_IN, TOY
from unirl.envs.slots import Source
from unirl.envs.spaces import Array
from unirl.types.environments import STATE

if TYPE_CHECKING:
    import gymnasium

WRIST = "robot0_eye_in_hand"
"""The camera at the hand."""
NUM_STATE = 8
"""Position of the hand [3], its rotation as axis times angle [3] in radians, places of the two fingers [2]."""
NUM_ACTIONS = 7
"""Changes of position and rotation, and the gripper: -1 opens it, 1 closes it."""
WAIT = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""The action that does nothing with an open gripper."""
INSTALL = "pip install git+https://github.com/Lifelong-Robot-Learning/LIBERO 'robosuite==1.4.1' bddl easydict"


class LiberoEnvironment(GymnasiumEnvironment):
    """Slots with the tasks of a suite of LIBERO: images of cameras, the state of the robot [8], actions [7].

    The task of a start names the task by its words, as the suite has them; list them in `data_source.tasks`. The seed
    chooses one of the recorded initial states of the task. The reward is 1 where the task is solved, which ends the
    episode with success. `suite: toy` is the environment of `unirl.envs.pixel_reach` behind the same camera.
    """

    toy: ClassVar[Mapping[str, object]] = {"suite": TOY, "workers": 0}

    def __init__(
        self,
        *,
        suite: str,
        camera: str = "agentview",
        wrist: bool = False,
        state: bool = False,
        image_size: tuple[int, int] = (256, 256),
        settle_steps: Annotated[int, msgspec.Meta(ge=0)] = 10,
        openvla_gripper: bool = False,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] = 220,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0,
    ) -> None:
        """
        Args:
            suite: name of the suite, such as `libero_spatial`, or `toy`.
            camera: `agentview` or `robot0_eye_in_hand`, which is the key of the images.
            wrist: also show `robot0_eye_in_hand`, the camera at the hand.
            state: also show `state` [8]: position of the hand in metres, its rotation as axis times angle in radians,
                and the places of both fingers in metres.
            image_size: height and width of an image.
            settle_steps: steps without an action at the start of an episode, in which objects come to rest.
            openvla_gripper: the last number of an action is that of OpenVLA, 1 for an open gripper and 0 for a closed
                one. It becomes -1 or 1.
            workers: number of processes that share the slots. 0: all environments are in this process.
            max_steps: number of steps after which an episode is truncated.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.

        Raises:
            DependencyError: 3001, libero is not installed.
        """
        cameras = (camera, WRIST) if wrist and camera != WRIST else (camera,)
        if suite == TOY:
            need("gymnasium", by=type(self).__name__, extra="embodied")
            maker = STAND_IN
            given = {
                "camera": camera,
                "size": image_size,
                "actions": NUM_ACTIONS,
                "more_cameras": cameras[1:],
                "state": NUM_STATE if state else 0,
            }
        else:
            need("libero", by=f"{type(self).__name__} (suite={suite})", install=INSTALL)
            maker = "unirl.envs.libero:make_suite"
            given = {
                "cameras": cameras,
                "state": state,
                "size": image_size,
                "settle": settle_steps,
                "openvla_gripper": openvla_gripper,
            }
        self._open(Source(id=suite, kwargs=given, maker=maker, max_steps=max_steps), workers, timeout_s)


def make_suite(
    suite: str,
    *,
    render_mode: str | None,
    cameras: Sequence[str],
    state: bool,
    size: tuple[int, int],
    settle: int,
    openvla_gripper: bool,
) -> gymnasium.Env[Any, Any]:
    """An environment that plays any task of a suite. The task of an episode is the option `task` of its reset."""
    import gymnasium
    from gymnasium import spaces
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv

    tasks = benchmark.get_benchmark_dict()[suite]()
    by_words = {tasks.get_task(number).language: number for number in range(tasks.get_num_tasks())}
    height, width = size
    shown: dict[str, gymnasium.Space[Any]] = {
        camera: spaces.Box(0, 255, (height, width, 3), np.uint8) for camera in cameras
    }
    if state:
        shown[STATE] = spaces.Box(-np.inf, np.inf, (NUM_STATE,), np.float32)

    class SuiteEnvironment(gymnasium.Env[Any, Any]):
        """Holds the simulator of the task that it played last."""

        observation_space = spaces.Dict(shown)
        action_space = spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), np.float32)

        def __init__(self) -> None:
            self.words = ""
            self.simulator: Any = None  # of a package without types

        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            words = str((options or {}).get("task", ""))
            if words not in by_words:
                raise ValueError(f"the task {words!r} is none of {suite}, which has {', '.join(by_words)}")
            simulator = self._simulator_of(words)
            states = tasks.get_task_init_states(by_words[words])
            simulator.seed(0)
            simulator.reset()
            observation = simulator.set_init_state(states[(seed or 0) % len(states)])
            for _ in range(settle):
                observation, _, _, _ = simulator.step(list(WAIT))
            return self._seen(observation), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            given = np.asarray(action, np.float64).copy()
            if openvla_gripper:
                given[-1] = -1.0 if given[-1] > 0.5 else 1.0
            observation, reward, _, _ = self.simulator.step(given.tolist())
            is_solved = bool(self.simulator.check_success())
            return self._seen(observation), float(reward), is_solved, False, {"success": is_solved}

        def close(self) -> None:
            if self.simulator is not None:
                self.simulator.close()
                self.simulator = None

        def _simulator_of(self, words: str) -> Any:
            if self.simulator is None or words != self.words:
                self.close()
                task = tasks.get_task(by_words[words])
                file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
                self.simulator = OffScreenRenderEnv(
                    bddl_file_name=str(file), camera_heights=height, camera_widths=width
                )
                self.words = words
            return self.simulator

        def _seen(self, observation: Any) -> dict[str, Array]:
            # LIBERO draws upside down; the published policies were trained on images turned by 180 degrees.
            seen = {camera: np.ascontiguousarray(observation[f"{camera}_image"][::-1, ::-1]) for camera in cameras}
            return seen | ({STATE: robot_state(observation)} if state else {})

    return SuiteEnvironment()


def robot_state(observation: Mapping[str, Any]) -> Array:
    """[8] float32, see `NUM_STATE`, from an observation of robosuite."""
    rotation = axis_angle(observation["robot0_eef_quat"])
    parts = (observation["robot0_eef_pos"], rotation, observation["robot0_gripper_qpos"])
    return np.concatenate(parts).astype(np.float32)


def axis_angle(quaternion: Any) -> Array:
    """[3] axis times angle in [0, 2 pi], of a unit quaternion (x, y, z, w). Zeros for no rotation.

    The angle is 2 acos(w), as in robosuite and so in the data of the published policies: a quaternion and its negative,
    which are the same rotation, have different vectors.
    """
    vector, w = np.asarray(quaternion[:3], np.float64), float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if sine < 1e-8 else vector * (2.0 * np.arccos(w) / sine)
