"""The simulated Franka arm of SERL, which lifts a cube. https://github.com/rail-berkeley/serl, folder franka_sim

The package is older than Gymnasium 1, which demands a size of the renderer that its constructor makes. The adapter ran
with a copy in which `MujocoRenderer(...)` has one. Images are drawn by `unirl.envs.cameras`, not by that renderer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from unirl.config.dependencies import need
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.slots import Source

if TYPE_CHECKING:
    import gymnasium

LIFT = 0.2
"""Metres above its start at which the cube counts as lifted, as in the reward of the package."""
SIZES = {"panda/tcp_pos": 3, "panda/tcp_vel": 3, "panda/gripper_pos": 1, "block_pos": 3}
"""Numbers by their names: place of the hand in metres, its velocity in metres per second, how far it is closed
from 0 to 1, and the place of the cube in metres."""
PIXELS = 128
NUM_ACTIONS = 4
"""Changes of position (x, y, z) and of the gripper."""
INSTALL = "pip install 'git+https://github.com/rail-berkeley/serl#subdirectory=franka_sim'"


class FrankaSimEnvironment(GymnasiumEnvironment):
    """Slots with the task `PandaPickCube` of franka_sim: the state of the arm and of the cube, actions [4].

    Observations have the keys `state.panda/tcp_pos` [3], `state.panda/tcp_vel` [3], `state.panda/gripper_pos` [1] and
    `state.block_pos` [3]. The reward, between 0 and 1, grows as the hand nears the cube and lifts it. A cube that is
    lifted by 0.2 m is a success, which does not end the episode.
    """

    def __init__(
        self,
        *,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] = 100,
        observation_keys: tuple[str, ...] = (),
        frame_stack: Annotated[int, msgspec.Meta(ge=1)] = 1,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            workers: number of processes that share the slots. 0: all environments are in this process.
            max_steps: number of steps after which an episode is truncated.
            observation_keys: keys that the policy sees. Empty: all of them.
            frame_stack: number of newest observations that are joined along their first axis.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.
            cameras: height and width of an image by the name of a camera, `front` or `handcam_rgb`. null: no images.

        Raises:
            DependencyError: 3001, franka_sim is not installed.
        """
        need("franka_sim", by=type(self).__name__, install=INSTALL)
        need("gymnasium", by=type(self).__name__, extra="embodied")
        source = Source(
            id="PandaPickCube",
            maker="unirl.envs.franka_sim:make_pick_cube",
            max_steps=max_steps,
            observation_keys=tuple(observation_keys),
            frame_stack=frame_stack,
            cameras=dict(cameras or {}),
        )
        self._open(source, workers, timeout_s)


def make_pick_cube(name: str, *, render_mode: str | None) -> gymnasium.Env[Any, Any]:
    """The task as an environment of Gymnasium; the package has the interface of its predecessor, gym."""
    import gymnasium
    from franka_sim.envs import PandaPickCubeGymEnv
    from gymnasium import spaces

    boxes = {key: spaces.Box(-np.inf, np.inf, (size,), np.float32) for key, size in SIZES.items()}

    class PickCube(gymnasium.Env[Any, Any]):
        """The package draws the place of the cube from numpy's global generator, which a reset with a seed sets."""

        observation_space = spaces.Dict({"state": spaces.Dict(boxes)})
        action_space = spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), np.float32)

        def __init__(self) -> None:
            try:
                self.simulator = PandaPickCubeGymEnv(time_limit=float("inf"))
            except AssertionError as error:
                raise gymnasium.error.Error(
                    f"{error} Gymnasium 1.x demands a size of the MujocoRenderer that franka_sim makes: in its file "
                    f"envs/panda_pick_gym_env.py, add width={PIXELS}, height={PIXELS} to MujocoRenderer(...)"
                ) from error
            self.model, self.data = self.simulator.model, self.simulator.data
            self.start_height = 0.0

        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            before = np.random.get_state()
            np.random.seed(None if seed is None else seed % 2**32)
            try:
                observation, info = self.simulator.reset()
            finally:
                np.random.set_state(before)
            self.start_height = self._height()
            return observation, info

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, info = self.simulator.step(action)
            is_lifted = self._height() - self.start_height >= LIFT
            return observation, float(reward), bool(terminated), bool(truncated), info | {"success": is_lifted}

        def close(self) -> None:
            self.simulator.close()

        def _height(self) -> float:
            return float(self.data.sensor("block_pos").data[2])

    return PickCube()
