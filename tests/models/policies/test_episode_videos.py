"""Videos of episodes show what the environment drew, frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.scripted_environment import KINDS, Clocks, length_of, pipeline, request
from unirl.config.errors import DependencyError
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.models.policies.videos import EpisodeVideos, shrunk
from unirl.types.environments import EpisodeStart
from unirl.types.primitives import Episodes, Videos
from unirl.types.rollout_req import RolloutReq


class Drawn(Clocks):
    """An image has the steps so far as its level."""

    def render(self, slots: Sequence[int]) -> Tensor:
        levels = torch.tensor([self.steps[slot] for slot in slots], dtype=torch.uint8)
        return levels[:, None, None, None].expand(-1, 3, 8, 16)


def filmed(env: Clocks, settings: EpisodeVideos, req: RolloutReq, chunk: int = 8) -> Videos | None:
    acting = PolicyPipeline(pipeline(env).bundle, env=env, videos=settings)
    episodes = acting.generate(req, chunk).tracks["action"].decoded
    assert isinstance(episodes, Episodes)
    return episodes.videos


def levels_of(videos: Videos) -> list[list[int]]:
    """The level of each frame, which is the same everywhere in it, by video."""
    assert videos.frames.shape[1:] == (3, 8, 16) and videos.frames.dtype == torch.uint8
    assert bool((videos.frames == videos.frames[:, :1, :1, :1]).all())
    flat, bounds = videos.frames[:, 0, 0, 0].tolist(), videos.offsets.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


def evaluation() -> RolloutReq:
    return request(groups=["a", "a", "b", "b"]).replace(purpose="eval")


@pytest.mark.parametrize("chunk", [8, 3])
def test_a_video_has_every_second_state_and_the_end_of_its_episode(chunk: int) -> None:
    videos = filmed(env := Drawn(KINDS[0]), EpisodeVideos(rows=2, every=2), evaluation(), chunk)
    assert videos is not None
    lengths = [length_of(seed % 1000) for seed in env.seeds]
    shown = [[*range(0, n, 2), n] for n in lengths]
    assert levels_of(videos) == [shown[0], [], shown[2], []], "the first row of each group"


def test_a_long_episode_keeps_fewer_frames_that_are_evenly_spaced() -> None:
    videos = filmed(env := Drawn(KINDS[0]), EpisodeVideos(frames=4), evaluation())
    assert videos is not None
    assert {length_of(seed % 1000) for seed in env.seeds} == {5}
    assert levels_of(videos) == [[0, 2, 4, 5]] * 4


def test_a_continuing_row_shows_its_first_episode_alone() -> None:
    req = request(max_steps=17, continuing=True).replace(purpose="eval")
    videos = filmed(env := Drawn(KINDS[1], cuts=True), EpisodeVideos(), req)
    assert videos is not None
    assert levels_of(videos) == [list(range(length_of(seed % 1000) + 1)) for seed in env.seeds[:4]]


def test_a_row_that_fails_has_the_frames_before_its_fault() -> None:
    videos = filmed(Drawn(KINDS[0], broken=[1]), EpisodeVideos(), evaluation())
    assert videos is not None and levels_of(videos)[1] == [0, 1]


@pytest.mark.parametrize(("step", "is_drawn"), [(0, False), (8, False), (9, True), (19, True)])
def test_training_is_drawn_in_the_steps_whose_samples_are_kept(step: int, is_drawn: bool) -> None:
    assert (filmed(Drawn(KINDS[0]), EpisodeVideos(), request(step=step)) is not None) == is_drawn
    assert filmed(Drawn(KINDS[0]), EpisodeVideos(steps=0), request(step=step)) is None


def test_an_environment_that_draws_nothing_has_no_videos() -> None:
    assert filmed(Clocks(KINDS[0]), EpisodeVideos(), evaluation()) is None


def test_drawing_changes_no_decision() -> None:
    req = evaluation()
    plain = pipeline(Drawn(KINDS[0])).generate(req, 8).tracks["action"]
    acting = PolicyPipeline(pipeline(env := Drawn(KINDS[0])).bundle, env=env, videos=EpisodeVideos())
    drawn = acting.generate(req, 8).tracks["action"]
    assert torch.equal(plain.segment.actions, drawn.segment.actions)
    assert torch.equal(plain.segment.logp, drawn.segment.logp)


def test_a_smaller_image_is_the_mean_of_blocks() -> None:
    image = torch.zeros(1, 3, 4, 8, dtype=torch.uint8)
    image[:, :, :, 4:] = 200
    small = shrunk(image, 2)
    assert small.shape == (1, 3, 1, 2) and small[0, 0, 0, 0] < 50 and small[0, 0, 0, 1] > 150
    assert shrunk(image, 8) is image


class Undrawable(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        raise RuntimeError("no display")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_machine_that_cannot_draw_goes_on_without_or_says_the_way_out(workers: int, capsys) -> None:
    id = "tests.models.policies.test_episode_videos:Undrawable-v0"
    environment = GymnasiumEnvironment(id=id, workers=workers, render="auto", max_steps=3)
    environment.reset([0, 1], [EpisodeStart(seed=0)] * 2)
    assert environment.render([0, 1]) is None and environment.render([0]) is None
    assert capsys.readouterr().err.count("RuntimeError: no display") == 1
    environment.close()
    with pytest.raises(DependencyError, match=r"MUJOCO_GL=egl .*pipeline\.env.render=auto"):  # before any step
        GymnasiumEnvironment(id=id, workers=workers, render=True, max_steps=3)


gymnasium.register("Undrawable-v0", entry_point=Undrawable)


class Sketch(Undrawable):
    """Draws a gradient that the start decides."""

    def render(self):
        rows, columns = np.mgrid[:6, :8]
        level = self.np_random_seed % 50
        return np.stack([rows + level, columns, rows * columns], axis=2).astype(np.uint8)


gymnasium.register("Sketch-v0", entry_point=Sketch)


def test_frames_of_gymnasium_are_those_of_the_environment() -> None:
    """Gymnasium draws [H, W, 3], and the frames are [3, H, W]."""
    environment = GymnasiumEnvironment(
        id="tests.models.policies.test_episode_videos:Sketch-v0", render=True, max_steps=3
    )
    environment.reset([0, 1], [EpisodeStart(seed=3), EpisodeStart(seed=7)])
    for slot, seed in ((0, 3), (1, 7)):
        own = Sketch()
        own.reset(seed=seed)
        drawn = environment.render([slot])
        assert drawn is not None
        assert np.array_equal(drawn[0].permute(1, 2, 0).numpy(), own.render())
