"""Observations of images: the cameras of MuJoCo, and the toy environment that draws its own pixels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.processes import run_python
from unirl.config.errors import InvalidValueError, UnsupportedEnvironmentError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.maniskill import ManiSkillImageEnvironment
from unirl.envs.pixel_reach import NEAR, RADIUS, STRIDE, PixelReachEnvironment
from unirl.testing import check_environment
from unirl.types.environments import EpisodeStart

SIZE = 64


def centres(images: torch.Tensor) -> torch.Tensor:
    """[B, 3, 2] the mean place of the bright pixels of each channel, in the plane [-1, 1] x [-1, 1]."""
    axis = (torch.arange(SIZE) + 0.5) * (2 / SIZE) - 1
    bright = images.double() / 255
    across, down = bright.sum(2), bright.sum(3)  # by column, by row
    total = bright.sum((2, 3))
    return torch.stack([across @ axis.double() / total, down @ axis.double() / total], dim=2)


def test_the_image_shows_all_that_an_episode_depends_on() -> None:
    """A controller that reads nothing but the image reaches the named target in the fewest steps."""
    env, slots = PixelReachEnvironment(size=SIZE), list(range(8))
    tasks = ["reach the red disc", "reach the blue disc"] * 4
    seen = env.reset(slots, [EpisodeStart(seed=5, task=task) for task in tasks])["pixels"]
    assert seen.dtype == torch.uint8 and (seen[0] == seen[1]).all()
    wanted = torch.tensor([0, 2] * 4)
    start = centres(seen)
    far = (start[slots, wanted] - start[:, 1]).abs().amax(1)
    total, alive = torch.zeros(8), slots
    for number in range(1, 12):
        where = centres(seen)
        gap = where[range(len(alive)), wanted[alive]] - where[:, 1]
        step = env.step(alive, (gap / STRIDE).float())
        total[alive] += step.rewards
        for place in torch.nonzero(step.terminated)[:, 0].tolist():
            assert number <= math.ceil(far[alive[place]] / STRIDE)
        seen = step.observations["pixels"][~step.terminated]
        alive = [slot for slot, over in zip(alive, step.terminated.tolist(), strict=True) if not over]
        if not alive:
            break
    assert not alive
    # The return is the distance that was covered, and 1: at least up to NEAR, at most the whole of it.
    whole = (start[slots, wanted] - start[:, 1]).norm(dim=1)
    assert (total >= 1 + whole - NEAR - 0.02).all() and (total <= 1 + whole + 0.02).all()


def test_without_a_task_there_is_one_target() -> None:
    env = PixelReachEnvironment(size=SIZE)
    plain, named = (env.reset([0], [EpisodeStart(seed=1, task=task)])["pixels"] for task in ("", "the blue one"))
    assert not plain[0, 2].any() and named[0, 2].any() and torch.equal(plain[0, :2], named[0, :2])
    area = float((named[0, 2] > 0).float().mean()) * 4
    assert area == pytest.approx(math.pi * RADIUS**2, rel=0.1)
    with pytest.raises(InvalidValueError, match="the task 'reach it' must name one target, red or blue"):
        env.reset([0], [EpisodeStart(seed=1, task="reach it")])


def test_the_toy_environment_keeps_the_contract() -> None:
    check_environment(PixelReachEnvironment())


CAMERA = """
import gymnasium, mujoco, numpy as np, torch
from unirl.envs.metaworld import MetaWorldEnvironment, make_task
from unirl.types.environments import EpisodeStart

env = MetaWorldEnvironment(task="reach-v3", cameras={"corner": (40, 48)}, frame_stack=2)
assert env.spaces.observations == {"corner": (6, 40, 48), "state": (78,)}, env.spaces
action = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
first = env.reset([0], [EpisodeStart(seed=3)])
step = env.step([0], action)
other = make_task("reach-v3", render_mode=None)
other.reset(seed=3)
renderer = mujoco.Renderer(other.unwrapped.model, 40, 48)
def image():
    renderer.update_scene(other.unwrapped.data, camera="corner")
    return torch.from_numpy(renderer.render().transpose(2, 0, 1).copy())
before = image()
other.step(action[0].numpy())
after = image()
assert torch.equal(first["corner"][0], torch.cat([before, before]))
assert torch.equal(step.observations["corner"][0], torch.cat([before, after])) and not torch.equal(before, after)
env.close()
renderer.close()
print("both", "match")
"""


@pytest.mark.slow
def test_a_camera_shows_what_mujocos_own_renderer_draws(tmp_path) -> None:
    """Also that stacked frames are the newest two, the newest last. Needs OpenGL: egl or osmesa."""
    outcomes = {}
    for back_end in ("egl", "osmesa"):
        script = tmp_path / f"{back_end}.py"
        script.write_text(CAMERA)
        _, outcomes[back_end] = run_python([str(script)], tmp_path, {"MUJOCO_GL": back_end})
    if all("an OpenGL platform library" in text or "cannot draw" in text for text in outcomes.values()):
        pytest.skip(f"OpenGL draws nothing here: {outcomes}")
    assert any("both match" in text for text in outcomes.values()), outcomes


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("CartPole-v1", "it has no MuJoCo model, so it has no cameras"),
        ("Reacher-v5", "it has no camera 'wrist'. Its cameras: none"),
        ("HalfCheetah-v5", "it has no camera 'wrist'. Its cameras: track"),
    ],
)
def test_a_camera_that_does_not_exist_is_named(id: str, why: str) -> None:
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        GymnasiumEnvironment(id=id, cameras={"wrist": (32, 32)})
    assert why in str(caught.value)


def test_a_stand_in_plays_the_episodes_of_the_toy_environment() -> None:
    """Through Gymnasium, whose start passes on the task in words; also in a worker."""
    plain = PixelReachEnvironment(size=24, actions=7)
    starts = [EpisodeStart(seed=4, task="reach the red disc"), EpisodeStart(seed=4, task="reach the blue disc")]
    actions = torch.rand(5, 2, 7, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for workers in (0, 1):
        stand_in = ManiSkillImageEnvironment(id="toy", image_size=(24, 24), workers=workers)
        assert stand_in.spaces.observations == {"base_camera": (3, 24, 24)}
        assert stand_in.spaces.actions == plain.spaces.actions
        first, expected = stand_in.reset([0, 1], starts), plain.reset([0, 1], starts)
        assert torch.equal(first["base_camera"], expected["pixels"])
        for action in actions:
            step, other = stand_in.step([0, 1], action), plain.step([0, 1], action)
            assert torch.equal(step.observations["base_camera"], other.observations["pixels"])
            assert torch.equal(step.rewards, other.rewards) and torch.equal(step.success, other.success)
            if (step.terminated | step.truncated).any():
                break
        stand_in.close()
