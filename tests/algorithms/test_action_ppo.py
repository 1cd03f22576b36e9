"""PPO and GRPO on decisions in environments: credit against a loop over episodes, and minibatches of decisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from tests.scripted_environment import Clocks, pipeline, request
from unirl.algorithms.action_ppo import ActionGRPO, ActionPPO
from unirl.algorithms.ar_ppo import ADVANTAGE, RETURN
from unirl.algorithms.shared.critic import OLD_VALUE
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.train import transition_stack
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, ValueConfig
from unirl.train.stack import TrainStack
from unirl.train.transition_stack import TransitionStack
from unirl.types.batch import tensors_of
from unirl.types.environments import ContinuousActions, DiscreteActions
from unirl.types.protocols import TrainingProgress
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment, PackedSegment

START = TrainingProgress()


def rows_of(policy: PolicyPipeline, **settings: Any) -> RolloutTrack[ActionSegment]:
    return policy.generate(request(**settings), 8).tracks["action"].sampled_as(ActionSegment)


def with_values(track: RolloutTrack[ActionSegment], seed: int = 0) -> RolloutTrack[ActionSegment]:
    """The rows with old values and log-probs, as the anchor pass leaves them; rewards are random, too."""
    generator = torch.Generator().manual_seed(seed)
    count = len(track.segment.logp)
    anchors = {OLD_VALUE: torch.randn(count, generator=generator), "old_logp": track.segment.logp}
    rewards = torch.randn(count, generator=generator)
    return track.replace(segment=track.segment.replace(anchors=anchors, rewards=rewards))


def credit_by_hand(segment: ActionSegment, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE of every row by the recursion of its equation, from the end backwards, in float64."""
    advantages = torch.zeros(len(segment.logp), dtype=torch.float64)
    values = segment.anchors[OLD_VALUE].double()
    for row in range(len(segment)):
        begin, end = int(segment.offsets[row]), int(segment.offsets[row + 1])
        running = 0.0
        for t in reversed(range(begin, end)):
            if not segment.loss_mask[t]:
                continue
            over = bool(segment.terminated[t])
            cut = bool(segment.truncated[t]) or t + 1 == end or not segment.loss_mask[t + 1]
            following = 0.0 if over else float(values[t + 1])
            delta = float(segment.rewards[t]) + gamma * following - float(values[t])
            running = delta + (0.0 if over or cut else gamma * lam * running)
            advantages[t] = running
    return advantages, torch.where(segment.loss_mask, advantages + values, 0.0)


@pytest.mark.parametrize("settings", [{}, {"max_steps": 2}, {"max_steps": 23, "continuing": True}], ids=str)
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.0), (0.97, 0.8)])
def test_credit_is_the_recursion_of_gae_over_each_episode(settings, cuts, gamma, lam) -> None:
    rows = with_values(rows_of(pipeline(Clocks(DiscreteActions(3), cuts)), rows=5, **settings))
    credited = ActionPPO(gamma=gamma, lam=lam, whiten=False).credited(rows, START).segment
    advantages, returns = credit_by_hand(rows.segment, gamma, lam)
    assert torch.allclose(credited.anchors[ADVANTAGE].double(), advantages, atol=1e-5)
    assert torch.allclose(credited.anchors[RETURN].double(), returns, atol=1e-5)


def credit_of_stable_baselines(segment: ActionSegment, gamma: float, lam: float) -> Tensor:
    """Advantages by the rollout buffer of Stable-Baselines3, where the reward before a cut has the value after it."""
    advantages = torch.zeros(len(segment.logp))
    values, ended = segment.anchors[OLD_VALUE], segment.terminated | segment.truncated
    for row in range(len(segment)):
        places = [t for t in range(int(segment.offsets[row]), int(segment.offsets[row + 1])) if segment.loss_mask[t]]
        following = [float(values[t + 1]) if not segment.terminated[t] else 0.0 for t in places]
        buffer = RolloutBuffer(
            len(places), Box(0, 1, (1,)), Discrete(2), device="cpu", gae_lambda=lam, gamma=gamma, n_envs=1
        )
        for i, t in enumerate(places):
            buffer.rewards[i, 0] = float(segment.rewards[t]) + (gamma * following[i] if segment.truncated[t] else 0.0)
            buffer.values[i, 0] = values[t]
            buffer.episode_starts[i, 0] = i == 0 or bool(ended[places[i - 1]])
        last = torch.tensor([following[-1]])
        buffer.compute_returns_and_advantage(last, dones=ended[places[-1:]].numpy())
        advantages[places] = torch.from_numpy(buffer.advantages[:, 0])
    return advantages


@pytest.mark.parametrize("cuts", [False, True])
def test_credit_is_that_of_stable_baselines_after_ends_and_cuts(cuts) -> None:
    """A row that its limit of decisions ends goes on with the value of what follows, as theirs does."""
    rows = with_values(rows_of(pipeline(Clocks(DiscreteActions(3), cuts)), rows=5, max_steps=23, continuing=True))
    assert bool((rows.segment.truncated if cuts else rows.segment.terminated).any())
    credited = ActionPPO(gamma=0.97, lam=0.8, whiten=False).credited(rows, START).segment
    expected = credit_of_stable_baselines(rows.segment, 0.97, 0.8)
    assert torch.allclose(credited.anchors[ADVANTAGE], expected, atol=1e-5)


def test_with_lambda_1_and_no_values_the_advantage_is_the_return_to_go() -> None:
    rows = rows_of(pipeline(Clocks(DiscreteActions(3))))
    zeros = {OLD_VALUE: torch.zeros(len(rows.segment.logp)), "old_logp": rows.segment.logp}
    rows = rows.replace(segment=rows.segment.replace(anchors=zeros))
    credited = ActionPPO(gamma=1.0, lam=1.0, whiten=False).credited(rows, START).segment
    expected = [sum(range(t, n + 1)) for n in rows.segment.lengths.tolist() for t in range(1, n + 1)]
    assert credited.anchors[ADVANTAGE].tolist() == pytest.approx(expected)


def test_a_row_of_weight_0_has_no_credit() -> None:
    rows = with_values(rows_of(pipeline(Clocks(DiscreteActions(3)))))
    weight = rows.weight.clone()
    weight[1] = 0.0
    segment = rows.segment
    broken = segment.rewards.clone()
    broken[int(segment.offsets[1]) : int(segment.offsets[2])] = torch.nan
    dropped = rows.replace(weight=weight, segment=segment.replace(rewards=broken))
    credited = ActionPPO(whiten=False).credited(dropped, START).segment.anchors[ADVANTAGE]
    assert credited[int(segment.offsets[1]) : int(segment.offsets[2])].abs().max() == 0 and credited.isfinite().all()


def stack_of(policy: PolicyPipeline, kind: type[TrainStack], algorithm: Any, **settings: Any) -> TrainStack:
    backend = FSDPBackend(
        policy.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        value_cfg=ValueConfig(learning_rate=1e-2, width=8),
        fsdp_cfg=FSDPConfig(reduce_dtype="fp64"),
    )
    return kind(backend, algorithm, policy.stage, **settings)


def weights_after(kind: type[TrainStack], **settings: Any) -> dict[str, Tensor]:
    policy = pipeline(Clocks(ContinuousActions(2), cuts=True))
    track = rows_of(policy, rows=4, max_steps=11, continuing=True)
    stack = stack_of(policy, kind, ActionPPO(), **settings)
    stack.train_track(track)
    return dict(stack.backend.gather())


def test_one_pass_with_one_minibatch_is_the_update_of_whole_rows() -> None:
    whole = weights_after(TrainStack, micro_batch_size=4)
    single = weights_after(TransitionStack, micro_batch_size=4, epochs=1, minibatch_size=44)
    for name, value in whole.items():
        assert torch.allclose(single[name], value, atol=1e-6), name


def test_minibatches_cut_into_several_forwards_make_the_same_updates() -> None:
    """44 decisions in minibatches of 20, so that the last one has 4: a forward of 3, one of 1, and five without any."""
    settings = {"micro_batch_size": 4, "epochs": 2, "minibatch_size": 20}
    whole = weights_after(TransitionStack, **settings)
    cut = weights_after(TransitionStack, **settings, forward_decisions=3)
    for name, value in whole.items():
        assert torch.allclose(cut[name], value, atol=1e-6), name


@pytest.mark.parametrize("minibatches", [0, 1, 2])
def test_few_minibatches_are_copied_at_once_and_the_bits_stay(minibatches: int, monkeypatch) -> None:
    """44 decisions in minibatches of 10, of which as many are copied as fit into the memory for copies, or one."""
    settings = {"micro_batch_size": 4, "epochs": 2, "minibatch_size": 10, "forward_decisions": 4}
    whole = weights_after(TransitionStack, **settings)
    made, sizes = transition_stack.single_elements, list[int]()

    def recorded(rows: RolloutTrack[PackedSegment], chosen: Tensor) -> RolloutTrack:
        sizes.append(len(chosen))
        copied = made(rows, chosen)
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(copied.segment.packed_fields()))
        monkeypatch.setattr(transition_stack, "COPIED_BYTES", num_bytes * 10 * minibatches // len(copied.segment.logp))
        return copied

    monkeypatch.setattr(transition_stack, "single_elements", recorded)
    weights = weights_after(TransitionStack, **settings)
    at_once = max(minibatches, 1)
    assert sizes == [0, *2 * {1: [10, 10, 10, 10, 4], 2: [20, 20, 4]}[at_once]]
    assert all(torch.equal(weights[name], value) for name, value in whole.items())


def test_every_pass_trains_every_decision_once() -> None:
    policy = pipeline(Clocks(ContinuousActions(2), cuts=True))
    track = rows_of(policy, rows=4, max_steps=11, continuing=True)
    stack = stack_of(policy, TransitionStack, ActionPPO(), micro_batch_size=4, epochs=3, minibatch_size=10)
    seen: list[Tensor] = []
    update = stack.update

    def recorded(micros: Any, now: Any, first: bool, watch: Any) -> Any:
        seen.extend(micro.segment.logp for micro in micros)
        return update(micros, now, first, watch)

    stack.update = recorded  # type: ignore[method-assign]
    stack.train_track(track)
    decided = track.segment.logp[track.segment.loss_mask]
    assert [len(each) for each in seen] == 3 * [10, 10, 10, 10, 4]
    passes = [torch.cat(seen[5 * epoch : 5 * epoch + 5]) for epoch in range(3)]
    for each in passes:
        assert torch.equal(each.sort().values, decided.sort().values)
    assert not torch.equal(passes[0], passes[1])


def test_the_gradient_of_grpo_at_ratio_1_is_that_of_the_weighted_log_probs() -> None:
    policy = pipeline(Clocks(DiscreteActions(3)))
    track = rows_of(policy, rows=4).replace(advantages=torch.tensor([1.0, -0.5, 0.25, 2.0]))
    loss = ActionGRPO().loss(policy.stage, track, (0,)).loss
    lengths = track.segment.lengths
    logp = policy.stage.replay({}, track.segment).logp
    expected = -(track.advantages.repeat_interleave(lengths) * logp).sum()
    parameters = list(policy.bundle.trainable().parameters())
    ours = torch.autograd.grad(loss, parameters)
    theirs = torch.autograd.grad(expected, parameters)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
