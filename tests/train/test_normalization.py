"""Running statistics beside those of Stable-Baselines3's VecNormalize on the same stream, and what becomes of them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.scripted_environment import KINDS, Clocks, request
from tests.train.ranks import run_ranks
from unirl.algorithms.action_ppo import ActionPPO
from unirl.distributed import current
from unirl.models.policies.bundle import GaussianBundle, PolicyBundle
from unirl.models.policies.networks import CLIP
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.normalization import RunningMoments, RunningStatistics
from unirl.train.transition_stack import TransitionStack
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment

LENGTH, STEPS, ENVIRONMENTS, GAMMA = 7, 30, 2, 0.9


class Random(gymnasium.Env[Any, Any]):
    """Observations and rewards at random, in episodes of LENGTH steps that are cut off."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, number: int) -> None:
        self.numbers = np.random.default_rng(number)
        self.observed: list[np.ndarray] = []
        self.rewards: list[float] = []

    def _observation(self) -> np.ndarray:
        self.observed.append(self.numbers.normal([3.0, -40.0], [0.1, 25.0]).astype(np.float32))
        return self.observed[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.rewards.append(float(self.numbers.normal(2.0, 5.0)))
        return self._observation(), self.rewards[-1], False, self.time == LENGTH, {}


def segment_of(observations: Tensor, rewards: Tensor, ends: Tensor) -> ActionSegment:
    """A segment with one row for each environment, from tensors [environments, steps, ...]."""
    rows, steps = rewards.shape
    nothing = torch.zeros(rows * steps)
    return ActionSegment(
        observations={"state": observations.flatten(0, 1)},
        offsets=torch.arange(rows + 1) * steps,
        finished=torch.zeros(rows, dtype=torch.bool),
        anchors={},
        actions=nothing[:, None],
        logp=nothing,
        loss_mask=torch.ones(rows * steps, dtype=torch.bool),
        rewards=rewards.flatten(),
        terminated=torch.zeros(rows * steps, dtype=torch.bool),
        truncated=ends.flatten(),
        success=torch.zeros(rows * steps, dtype=torch.bool),
        num_steps=torch.ones(rows * steps, dtype=torch.int64),
    )


def test_the_statistics_are_those_of_vec_normalize_on_the_same_stream() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    vec, moments = sb3.common.vec_env, sb3.common.running_mean_std.RunningMeanStd
    raw = vec.DummyVecEnv([lambda i=i: Random(i) for i in range(ENVIRONMENTS)])
    theirs = vec.VecNormalize(raw, gamma=GAMMA)
    # Theirs begin with a mean of 0 and a variance of 1, as if 1e-4 values had been seen. Ours begin with nothing.
    theirs.obs_rms, theirs.ret_rms = moments(1e-12, (2,)), moments(1e-12)
    theirs.reset()
    decided, rewards, ends = [raw.buf_obs[None].copy()], [], []
    for _ in range(STEPS):
        before = theirs.obs_rms.copy()
        _, scaled, over, _ = theirs.step(np.zeros((ENVIRONMENTS, 1), np.float32))
        decided.append(theirs.get_original_obs())
        rewards.append(theirs.get_original_reward())
        ends.append(over)
    seen = torch.from_numpy(np.stack(decided[:-1], 1))
    segment = segment_of(seen, torch.from_numpy(np.stack(rewards, 1)).float(), torch.from_numpy(np.stack(ends, 1)))

    ours = RunningStatistics({"state": (2,)}, rewards=True)
    parameters = ours.see(segment, segment.loss_mask)
    assert np.allclose(ours.observations["state"].mean, before.mean, rtol=1e-6)  # their means of a step are float32
    assert np.allclose(ours.observations["state"].std, np.sqrt(before.var + theirs.epsilon), rtol=1e-6)
    assert torch.allclose(parameters["encoder.state_mean"].double(), torch.from_numpy(before.mean), rtol=1e-6)
    got = ours.scaled_rewards(segment, segment.loss_mask, GAMMA).unflatten(0, (ENVIRONMENTS, STEPS))
    assert ours.rewards is not None
    assert float(ours.rewards.std) == pytest.approx(float(np.sqrt(theirs.ret_rms.var + theirs.epsilon)), rel=1e-6)
    assert np.allclose(got[:, -1], scaled, rtol=1e-5)  # the rewards of the last step have the statistics of all


def normalized_stack(bundle: PolicyBundle) -> TransitionStack:
    policy = PolicyPipeline(bundle, env=Clocks(KINDS[1]))
    optimizer, value = OptimizerConfig(learning_rate=1e-2), ValueConfig(width=8)
    backend = FSDPBackend(policy.bundle, optimizer_cfg=optimizer, value_cfg=value)
    return TransitionStack(backend, ActionPPO(), policy.stage, epochs=2, minibatch_size=8, normalize_rewards=True)


def small_policy() -> PolicyBundle:
    return GaussianBundle(observations=2, actions=2, width=8, normalize=True)


def on_a_rank(parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Mean and std after the values of this rank in two pieces; then what policy and value head hold of the mean."""
    moments = RunningMoments((2,))
    for piece in parts[current().dp_rank].tensor_split(2):
        moments.add(piece)
    stack, name = normalized_stack(small_policy()), "encoder.state_mean"
    stack.backend.assign({name: moments.mean, f"value_head.{name}": 2 * moments.mean})
    layout = stack.backend.layouts[1]
    held = layout.whole(layout.trainable[f"value_head.{name}"])
    return moments.mean, moments.std, stack.backend.gather()[name], held


def test_two_ranks_find_the_statistics_of_all_values_and_hold_the_same_parameters() -> None:
    values = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * 7 - 3
    first, second = run_ranks(2, on_a_rank, [values[:13], values[13:]])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    mean, std, policy, value = first
    assert np.allclose(mean, values.double().mean(0), rtol=1e-12)
    assert np.allclose(std, values.double().std(0, unbiased=False), rtol=1e-9)
    assert np.allclose(policy, mean, rtol=1e-6) and np.allclose(value, 2 * mean, rtol=1e-6)


def rolled(policy: PolicyPipeline, step: int) -> RolloutTrack:
    track = policy.generate(request(step=step), 8).tracks["action"].sampled_as(ActionSegment)
    return track.replace(weight=torch.tensor([1.0, 1.0, 1.0, 0.0]))


def test_a_step_of_ppo_writes_its_observations_into_both_encoders_and_the_export(tmp_path) -> None:
    bundle = small_policy()
    stack = normalized_stack(bundle)
    policy = PolicyPipeline(bundle, env=Clocks(KINDS[1]))
    policy.stage = stack.stage
    track = rolled(policy, 0)
    returns = track.segment.rewards.clone()
    stack.train_track(track)
    counted = track.segment.observations["state"][: int(track.segment.offsets[3])].double()
    for network in (stack.stage.network, stack.stage.value_head):
        mean, std = (network.get_parameter(f"encoder.state_{name}") for name in ("mean", "std"))
        assert torch.allclose(mean.double(), counted.mean(0), rtol=1e-5)
        assert torch.allclose(std.double(), counted.std(0, unbiased=False), rtol=1e-4)
        assert mean.grad is None
    assert torch.equal(track.segment.rewards, returns)
    far = {"state": torch.full((1, 2), 1e6)}
    bounded = {"state": mean.detach() + CLIP * std.detach()[None]}
    assert torch.allclose(stack.stage.policy.parameters_of(far), stack.stage.policy.parameters_of(bounded), atol=1e-5)

    read = PolicyBundle.from_files(path=str(bundle.write(tmp_path / "policy", stack.backend.gather())))
    assert torch.equal(read.trainable().get_parameter("encoder.state_mean"), mean.cpu())


def test_restored_statistics_go_on_as_if_nothing_had_happened() -> None:
    policy = PolicyPipeline(small_policy(), env=Clocks(KINDS[1]))
    first = RunningStatistics({"state": (2,)}, rewards=True)
    segments = [rolled(policy, step).segment for step in range(2)]

    def add(statistics: RunningStatistics, segment: ActionSegment) -> Tensor:
        statistics.see(segment, segment.loss_mask)
        return statistics.scaled_rewards(segment, segment.loss_mask, GAMMA)

    add(first, segments[0])
    second = RunningStatistics({"state": (2,)}, rewards=True)
    second.restore({name: value.clone() for name, value in first.state().items()})
    assert torch.equal(add(first, segments[1]), add(second, segments[1]))
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())
