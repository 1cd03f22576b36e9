"""A video model as an environment: chunks of actions, frames that are keyed, and rewards that are read from frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torch import Tensor

from tests.scripted_environment import request
from unirl.config.errors import IncompatibleError, InvalidValueError, NotFoundError
from unirl.config.load import load
from unirl.envs.messages import StartsRequest, StepRequest
from unirl.envs.pixel_reach import DiscReward, PixelReachEnvironment
from unirl.envs.remote import spaces_of
from unirl.envs.serve import answer, welcome
from unirl.envs.single import as_gymnasium
from unirl.envs.wire import tensor_of
from unirl.envs.world_model import WorldModelEnvironment
from unirl.models.policies.bundle import ChunkDecoderBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.models.world_model import ActionTokens
from unirl.plan.preflight import preflight
from unirl.testing import check_environment
from unirl.types.environments import Environment, EnvironmentStep, EpisodeStart, Observations

RECIPE = "embodied/world_model_pixel_reach_grpo"
STARTS = [EpisodeStart(seed=seed) for seed in range(3)]


class Scripted:
    """The frame of action `at` and all later ones show success; action c is worth c + 1."""

    def __init__(self, at: int = 99) -> None:
        self.at, self.frames = at, torch.zeros(0)

    def score(self, before: Tensor, frames: Tensor, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        self.frames = frames
        places = torch.arange(frames.shape[1]).expand(len(frames), -1)
        return places + 1.0, places >= self.at


def toy(**settings: Any) -> WorldModelEnvironment:
    plain: dict[str, Any] = {
        "path": "toy-world",
        "first": PixelReachEnvironment(),
        "reward": DiscReward(),
        "actions": 2,
        "chunk": 4,
        "max_steps": 8,
        "num_inference_steps": 2,
        "max_sequence_length": 8,
        "dtype": "fp32",
    }
    return WorldModelEnvironment(**plain | settings)


class Chunked:
    """Takes two actions at a time, one after another, in an environment that takes one."""

    is_keyed = True

    def __init__(self, inner: Environment) -> None:
        self.inner, self.spaces = inner, replace(inner.spaces, chunk=2)

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        return self.inner.reset(slots, starts)

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        first = self.inner.step(slots, actions[:, 0])
        assert not bool((first.terminated | first.truncated).any()), "the episodes of this test end with a chunk"
        second = self.inner.step(slots, actions[:, 1])
        return replace(second, rewards=first.rewards + second.rewards, success=first.success.maximum(second.success))

    def render(self, slots: Sequence[int]) -> Tensor | None:
        return self.inner.render(slots)

    def close(self) -> None:
        self.inner.close()


def test_the_environment_keeps_its_contract_and_that_of_gymnasium() -> None:
    check_environment(toy(reward=Scripted()), steps=3)
    check_env(as_gymnasium(toy(), images=("pixels",)), skip_render_check=True)


def test_all_slots_share_the_forwards_of_the_video_model() -> None:
    env, rows = toy(reward=Scripted()), []
    env.reset([0, 1, 2], STARTS)
    network = env._loaded().pipeline.bundle.trainable()
    network.register_forward_pre_hook(lambda _, args, given: rows.append(len(given["hidden_states"])), with_kwargs=True)
    env.step([0, 1, 2], torch.zeros(3, 4, 2))
    assert rows == [4, 4]  # two denoising steps, of three slots and a copy that fills the batch


def test_the_first_frame_that_shows_success_ends_the_episode() -> None:
    reward = Scripted(at=1)
    env = toy(reward=reward)
    env.reset([0, 1], STARTS[:2])
    step = env.step([0, 1], torch.zeros(2, 4, 2))
    assert step.rewards.tolist() == [3.0, 3.0]  # 1 + 2; the frames after it do not count
    assert step.terminated.all() and step.success.all() and not step.truncated.any()
    assert torch.equal(step.observations["pixels"], reward.frames[:, 1])


def test_a_chunk_continues_from_the_frame_before_it_and_the_horizon_cuts() -> None:
    """Equal frames, actions and noise give equal frames; here the number of the chunk gives other noise."""
    env = toy(reward=Scripted())
    env.reset([0], STARTS[:1])
    first = env.step([0], torch.zeros(1, 4, 2))
    assert first.rewards.item() == 10.0 and not first.truncated.item()
    last = env.step([0], torch.zeros(1, 4, 2))
    assert last.truncated.item() and not torch.equal(first.observations["pixels"], last.observations["pixels"])


@pytest.mark.parametrize("task", ["", "reach the red disc", "reach the blue disc"])
def test_a_reward_read_from_frames_is_that_of_the_environment(task: str) -> None:
    """A disc at an edge is cut off, so that its pixels are up to half of its radius away from its place."""
    env, slots = PixelReachEnvironment(size=64), list(range(32))
    frames = [env.reset(slots, [EpisodeStart(seed=seed, task=task) for seed in slots])["pixels"]]
    actions = torch.rand(3, 32, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    alive = torch.ones(32, dtype=torch.bool)
    for number in range(3):
        rows = torch.nonzero(alive)[:, 0]
        step = env.step(rows.tolist(), actions[number, rows])
        before = frames[-1][rows]
        rewards, success = DiscReward().score(before, step.observations["pixels"][:, None], [task] * len(rows))
        assert (success[:, 0] == step.success).float().mean() > 0.95  # a pixel more or less decides
        agrees = success[:, 0] == step.success
        torch.testing.assert_close(rewards[agrees, 0], step.rewards[agrees], atol=0.1, rtol=0)
        frames.append(frames[-1].index_copy(0, rows, step.observations["pixels"]))
        alive[rows[step.terminated]] = False


def test_a_frame_without_a_disc_is_far_from_everything() -> None:
    seen = PixelReachEnvironment().reset([0], STARTS[:1])["pixels"]
    rewards, success = DiscReward().score(seen, torch.full((1, 1, 3, 24, 24), 127, dtype=torch.uint8), [""])
    assert rewards.item() < -1 and not success.item()


def test_an_environment_that_takes_chunks_plays_the_rows_of_one_that_does_not() -> None:
    bundle = ChunkDecoderBundle(observations={"pixels": (3, 24, 24)}, actions=2, chunk=4, width=8)
    quiet: Any = PixelReachEnvironment
    req = request(6, max_steps=2)
    rows = [
        PolicyPipeline(bundle, env=env).generate(req, 6).tracks["action"].segment
        for env in (quiet(max_steps=8), Chunked(quiet(max_steps=8)))
    ]
    assert not (rows[0].success > 0).any()
    for name in ("actions", "logp", "rewards", "num_steps", "truncated"):
        assert torch.equal(getattr(rows[0], name), getattr(rows[1], name)), name
    assert rows[0].num_steps.tolist() == [4, 4, 0] * 6


def test_a_chunk_travels_to_a_server_and_back() -> None:
    here, there = toy(reward=Scripted()), toy(reward=Scripted())
    assert spaces_of(welcome(there.spaces, True)) == here.spaces
    actions = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(1))
    here.reset([0, 1], STARTS[:2])
    answer(there, StartsRequest([0, 1], [0, 1], ["", ""], [{}, {}]))
    reply = answer(there, StepRequest([0, 1], actions.numpy().tobytes()))
    assert not reply.error
    assert torch.equal(tensor_of(reply.observations["pixels"]), here.step([0, 1], actions).observations["pixels"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"first": PixelReachEnvironment(size=20)}, "20 x 20 pixels do not divide into the 8 x 8 .* multiples of 8"),
        ({"camera": "front"}, r"camera=front: pipeline.env.first shows pixels \[3, 24, 24\]"),
        ({"max_steps": 10}, "max_steps=10 is no multiple of the 4 actions .* Set max_steps=8"),
        ({"chunk": 6, "max_steps": 12}, "chunk=6: a latent frame of wan22 covers 4 frames.* Use a multiple of 4"),
        ({"max_sequence_length": 4}, "max_sequence_length=4 leaves no token for the text beside 4 actions"),
        ({"model": "wan21", "path": "toy"}, "path=toy reads no first frame. Use a model of image to video"),
    ],
)
def test_what_the_model_cannot_predict_is_refused_before_it_is_loaded(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValueError, match=says):
        toy(**settings)


def test_a_video_model_that_knows_no_actions_is_refused(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    with pytest.raises(NotFoundError, match=r"no actions\.safetensors: .* not trained on actions.*train_world_model"):
        ActionTokens.read(tmp_path, 2, 4, 32)
    save_file(dict(ActionTokens.toy(2, 8, 32).state_dict()), tmp_path / "actions.safetensors")
    with pytest.raises(InvalidValueError, match=r"chunks of 8 actions of 2 numbers.* Set pipeline\.env\.chunk=8"):
        ActionTokens.read(tmp_path, 2, 4, 32)


def test_a_policy_whose_chunks_do_not_fit_is_refused_before_the_run() -> None:
    with pytest.raises(IncompatibleError, match=r"decides on 2 actions at a time, .* takes 4\. Set bundle\.chunk=4"):
        preflight(load(RECIPE, ["scale=toy", "bundle.chunk=2"]))
