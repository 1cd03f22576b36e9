"""Images of the cameras of a MuJoCo model as observations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unirl.envs.spaces import STATE, Array

if TYPE_CHECKING:
    import gymnasium
    import mujoco

Sizes = Mapping[str, tuple[int, int]]
"""Height and width in pixels, by the name of a camera."""


def with_cameras(environment: gymnasium.Env[Any, Any], sizes: Sizes) -> gymnasium.Env[Any, Any]:
    """The environment with uint8 images [H, W, 3] of its cameras beside its own observation.

    The observation becomes a dictionary. An observation that is one array has the key `state` in it, and each image the
    name of its camera.

    Raises:
        gymnasium.error.Error: the environment has no MuJoCo model or no such camera, or MuJoCo cannot draw here.
    """
    import gymnasium
    from gymnasium import spaces

    own = environment.observation_space
    parts: dict[str, gymnasium.Space[Any]] = dict(own.spaces) if isinstance(own, spaces.Dict) else {STATE: own}
    for name in parts.keys() & sizes.keys():
        raise gymnasium.error.Error(f"it already has an observation {name!r}, so that no camera can have this name")
    model, data = model_of(environment), environment.unwrapped.data
    names = [model.camera(number).name for number in range(model.ncam)]
    for name in sizes:
        if name not in names:
            raise gymnasium.error.Error(f"it has no camera {name!r}. Its cameras: {', '.join(names) or 'none'}")
    renderers = {size: renderer_of(model, size) for size in sorted(set(sizes.values()))}

    class CameraObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
        """Draws after each reset and step."""

        def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
            observation, info = self.env.reset(**arguments)
            return self._seen(observation), info

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return self._seen(observation), reward, terminated, truncated, info

        def _seen(self, observation: Any) -> dict[str, Any]:
            seen = dict(observation) if isinstance(own, spaces.Dict) else {STATE: observation}
            return seen | {name: drawn(renderers[size], data, name) for name, size in sizes.items()}

        def close(self) -> None:
            for renderer in renderers.values():
                renderer.close()
            self.env.close()

    images = {name: spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in sizes.items()}
    wrapped = CameraObservations(environment)
    wrapped.observation_space = spaces.Dict(parts | images)
    return wrapped


def model_of(environment: gymnasium.Env[Any, Any]) -> mujoco.MjModel:
    """The MuJoCo model of an environment."""
    import gymnasium
    import mujoco

    model = vars(environment.unwrapped).get("model")
    if not isinstance(model, mujoco.MjModel):
        raise gymnasium.error.Error("it has no MuJoCo model, so it has no cameras. Leave out `cameras`")
    return model


def renderer_of(model: mujoco.MjModel, size: tuple[int, int]) -> mujoco.Renderer:
    """A renderer of images [height, width, 3]. It may enlarge the buffer that the model draws in."""
    import gymnasium
    import mujoco

    height, width = size
    model.vis.global_.offheight = max(model.vis.global_.offheight, height)
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
    try:
        return mujoco.Renderer(model, height, width)
    except Exception as error:  # each back end of OpenGL has exceptions of its own
        given = os.environ.get("MUJOCO_GL", "")
        raise gymnasium.error.Error(
            f"MuJoCo cannot draw images here with MUJOCO_GL={given!r} ({type(error).__name__}: {error}). Set the "
            "environment variable MUJOCO_GL=egl (package libegl1) or MUJOCO_GL=osmesa (package libosmesa6)"
        ) from error


def drawn(renderer: mujoco.Renderer, data: mujoco.MjData, camera: str) -> Array:
    """uint8 [height, width, 3]."""
    renderer.update_scene(data, camera=camera)
    return renderer.render()
