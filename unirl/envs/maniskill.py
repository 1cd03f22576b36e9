"""Tasks of ManiSkill 3 on the CPU simulation of SAPIEN, with observations of the state or of a camera. https://maniskill.readthedocs.io"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from unirl.config.dependencies import need
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.slots import Source

if TYPE_CHECKING:
    import gymnasium


TOY, STAND_IN = "toy", "unirl.envs.pixel_reach:make_stand_in"
"""The id of the stand-in of environments that cannot run everywhere, and what makes it."""


class ManiSkillEnvironment(GymnasiumEnvironment):
    """Slots with a task of ManiSkill, such as `PickCube-v1`: state [42], actions [8]. Nothing is drawn.

    SAPIEN gives every body a material, which needs a Vulkan device. This environment leaves out what is visible, so
    that the physics also run where there is none.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, object] | None = None,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
    ) -> None:
        """
        Args:
            id: name of the task, such as `PickCube-v1`.
            kwargs: further arguments of the environment, such as `control_mode: pd_ee_delta_pose`.
            workers: number of processes that share the slots. 0: all environments are in this process.
            max_steps: number of steps after which an episode is truncated. null: the task's own limit.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.

        Raises:
            DependencyError: 3001, mani_skill is not installed.
            InvalidValueError: 2004, an unknown id.
        """
        need("mani_skill", "sapien", by=f"{type(self).__name__} (id={id})", extra="maniskill")
        source = Source(id=id, kwargs=dict(kwargs or {}), maker="unirl.envs.maniskill:make_task", max_steps=max_steps)
        self._open(source, workers, timeout_s)


class ManiSkillImageEnvironment(GymnasiumEnvironment):
    """Slots with a task of ManiSkill that one of its cameras shows: an image and actions, no state.

    SAPIEN draws with Vulkan, which needs a GPU with its driver. `id: toy` is a stand-in that needs neither: the
    environment of `unirl.envs.pixel_reach` behind the same camera.
    """

    toy: ClassVar[Mapping[str, object]] = {"id": TOY}

    def __init__(
        self,
        *,
        id: str,
        camera: str = "base_camera",
        image_size: tuple[int, int] = (128, 128),
        actions: Annotated[int, msgspec.Meta(ge=2)] = 7,
        kwargs: Mapping[str, object] | None = None,
        workers: Annotated[int, msgspec.Meta(ge=0)] = 0,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0,
    ) -> None:
        """
        Args:
            id: name of the task, such as `PickCube-v1`, or `toy`.
            camera: name of the camera, which is the key of its observations.
            image_size: height and width of its images.
            actions: numbers of an action, for the stand-in. A task has 7 with `control_mode: pd_ee_delta_pose`.
            kwargs: further arguments of the environment, such as `control_mode: pd_ee_delta_pose`.
            workers: number of processes that share the slots. 0: all environments are in this process.
            max_steps: number of steps after which an episode is truncated. null: the task's own limit.
            timeout_s: seconds that an environment in a worker may take for a reset or a step.

        Raises:
            DependencyError: 3001, mani_skill is not installed.
            InvalidValueError: 2004, an unknown id.
        """
        if id == TOY:
            need("gymnasium", by=type(self).__name__, extra="embodied")
            maker, given = STAND_IN, {"camera": camera, "size": image_size, "actions": actions}
        else:
            need("mani_skill", "sapien", by=f"{type(self).__name__} (id={id})", extra="maniskill")
            maker = "unirl.envs.maniskill:make_image_task"
            given = {"camera": camera, "size": image_size, **(kwargs or {})}
        self._open(Source(id=id, kwargs=given, maker=maker, max_steps=max_steps), workers, timeout_s)


def make_image_task(
    task: str, *, render_mode: str | None, camera: str, size: tuple[int, int], **kwargs: object
) -> gymnasium.Env[Any, Any]:
    """A task whose observation is a dictionary with the image of one camera."""
    import gymnasium
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from gymnasium import spaces
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    height, width = size
    plain = {
        "obs_mode": "rgb",
        "sim_backend": "physx_cpu",
        "num_envs": 1,
        "sensor_configs": {camera: {"height": height, "width": width}},
    }
    whole = CPUGymWrapper(gymnasium.make(task, **plain | kwargs))
    shown = spaces.Dict({camera: spaces.Box(0, 255, (height, width, 3), np.uint8)})
    return gymnasium.wrappers.TransformObservation(
        whole, lambda observation: {camera: np.asarray(observation["sensor_data"][camera]["rgb"])}, shown
    )


def make_task(task: str, *, render_mode: str | None, **kwargs: object) -> gymnasium.Env[Any, Any]:
    """A task with state observations, as numpy arrays of one environment."""
    import gymnasium
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    leave_out_what_is_visible()
    plain = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "none", "num_envs": 1}
    return CPUGymWrapper(gymnasium.make(task, **plain | kwargs))


def leave_out_what_is_visible() -> None:
    """Make SAPIEN build bodies without materials and images, in this process."""
    import sapien
    from sapien.wrapper.actor_builder import ActorBuilder

    class NoMaterial:
        """Takes and keeps the properties of a material."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            vars(self).update(kwargs)

        def set_base_color(self, color: object) -> None:
            vars(self)["base_color"] = color

    material = sapien.render.RenderMaterial
    if material.__name__ == "NoMaterial":
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(("sapien", "mani_skill")) and vars(module).get("RenderMaterial") is material:
            vars(module)["RenderMaterial"] = NoMaterial
    add = sapien.Entity.add_component
    ActorBuilder.build_render_component = lambda self: None
    sapien.Entity.add_component = lambda self, part: self if part is None else add(self, part)
