"""One slot of an environment of ours as an environment of Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unirl.config.dependencies import need
from unirl.types.environments import NOT_REPORTED, DiscreteActions, Environment, EpisodeStart, Observations

if TYPE_CHECKING:
    import gymnasium


def as_gymnasium(environment: Environment, images: tuple[str, ...] = ()) -> gymnasium.Env[Any, Any]:
    """Slot 0 of `environment`: Dict observations, and what its `step` takes as the action.

    A reset takes the task in words as option `task`. `info["success"]` reports success, if the environment does.

    Args:
        images: keys of uint8 images, which become [H, W, C].
    """
    need("gymnasium", by="unirl.envs.single.as_gymnasium", extra="embodied")
    import gymnasium
    from gymnasium import spaces

    ours = environment.spaces

    def box(key: str, shape: tuple[int, ...]) -> spaces.Box:
        if key in images:
            return spaces.Box(0, 255, (*shape[1:], shape[0]), np.uint8)
        return spaces.Box(-np.inf, np.inf, shape, np.float32)

    class Single(gymnasium.Env[Any, Any]):
        """The only slot."""

        metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 16}  # noqa: RUF012 - Gymnasium's name
        observation_space = spaces.Dict({key: box(key, shape) for key, shape in ours.observations.items()})
        action_space: spaces.Space[Any] = (
            spaces.Box(-1.0, 1.0, ours.step_shape, np.float32)
            if not isinstance(ours.actions, DiscreteActions)
            else spaces.Discrete(ours.actions.count)
            if ours.chunk == 1
            else spaces.MultiDiscrete([ours.actions.count] * ours.chunk)
        )
        render_mode = "rgb_array"

        def reset(
            self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            task = str((options or {}).get("task", ""))
            start = EpisodeStart(seed=int(self.np_random.integers(2**62)), task=task)
            return self._seen(environment.reset([0], [start])), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            step = environment.step([0], torch.from_numpy(np.asarray(action))[None])
            ends = bool(step.terminated), bool(step.truncated)
            success = int(step.success)
            info = {} if success == NOT_REPORTED else {"success": bool(success)}
            return self._seen(step.observations), float(step.rewards), *ends, info

        def render(self) -> Any:
            drawn = environment.render([0])
            return None if drawn is None else self._channels_last(drawn[0])

        def close(self) -> None:
            environment.close()

        def _seen(self, observations: Observations) -> dict[str, Any]:
            return {
                key: self._channels_last(values[0]) if key in images else values[0].numpy()
                for key, values in observations.items()
            }

        def _channels_last(self, image: Tensor) -> Any:
            return image.permute(1, 2, 0).numpy()

    return Single()
