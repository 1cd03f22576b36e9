"""SAC, CrossQ and RLPD against a transcription of their equations that knows nothing of the code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn.functional import batch_norm, layer_norm, linear

from tests.off_policy import stage_with_critics, transitions
from unirl.algorithms.sac import SAC, critics_of
from unirl.algorithms.shared.critic_ensemble import Critics, RunningNorm, target_name
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.models.policies.stage import ActionStage
from unirl.types.transitions import Transitions

KINDS: dict[str, dict[str, Any]] = {
    "sac": {},
    "mean": {"actor_value": "mean", "learn_alpha": False, "alpha": 0.3},
    "redq": {"members": 5, "subset": 2},
    "rlpd": {"members": 4, "norm": "layer"},
    "crossq": {"norm": "batch", "target": "live"},
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def q_by_hand(
    critics: Critics, member: int, o: Tensor, a: Tensor, weights: str, batch_of: Tensor | None = None
) -> Tensor:
    """Q(o, a) of one critic, layer by layer.

    Args:
        batch_of: inputs [N, size] with whose statistics batch normalization works. None: running statistics.
    """

    def read(name: str) -> Tensor:
        if weights == "target":
            return critics.get_buffer(target_name(name))[member]
        value = critics.get_parameter(name)[member]
        return value.detach() if weights == "fixed" else value

    def norm(x: Tensor, i: int) -> Tensor:
        scale, shift = read(f"norms.{i}.scale")[0], read(f"norms.{i}.shift")[0]
        if critics.norm == "layer":
            return layer_norm(x, x.shape[-1:], scale, shift)
        if batch_of is not None:
            return batch_norm(x, None, None, scale, shift, training=True)
        node = critics.norms[i]
        return batch_norm(x, node.mean[member, 0].clone(), node.variance[member, 0].clone(), scale, shift)

    x = torch.cat([o, a], 1) if batch_of is None else batch_of
    if critics.norm == "batch":
        x = norm(x, 0)
    for i in range(len(critics.layers)):
        x = linear(x, read(f"layers.{i}.weight").T, read(f"layers.{i}.bias")[0])
        x = norm(x, i).relu() if critics.norm == "layer" else x.relu()
        x = norm(x, i + 1) if critics.norm == "batch" else x
    return linear(x, read("output_layer.weight").T, read("output_layer.bias")[0])[:, 0]


def policy_by_hand(stage: ActionStage, o: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """An action of torch.distributions' squashed Gaussian, and its log-prob."""
    mean, log_std = stage.policy.parameters_of({"state": o}).unbind(1)
    base = Independent(Normal(mean.double(), log_std.exp().double()), 1)
    squashed = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    action = (mean + log_std.exp() * noise).double().tanh()
    return action.float(), squashed.log_prob(action).float()


def gradients_by_hand(settings: dict[str, Any], stage: ActionStage, batch: Transitions) -> dict[str, list[Tensor]]:
    """The gradients of the three published losses, each taken by itself with respect to its own parameters."""
    loss, critics, draw = SAC(**settings), critics_of(stage), generator()
    noise = torch.randn(2, len(batch), 2, generator=draw)
    chosen = torch.randperm(loss.members, generator=draw)[: loss.subset].tolist()
    o, after, a = batch.observations["state"], batch.following["state"], batch.actions.tanh()
    next_action, next_logp = (each.detach() for each in policy_by_hand(stage, after, noise[1]))
    alpha = critics.log_alpha.exp()
    both = torch.cat([torch.cat([o, a], 1), torch.cat([after, next_action], 1)])
    joint = both if loss.norm == "batch" else None
    kind = "target" if loss.target == "polyak" else "fixed"
    following = [q_by_hand(critics, i, after, next_action, kind, joint)[-len(a) :].detach() for i in chosen]
    soft = torch.stack(following).min(0).values - alpha.detach() * next_logp
    goal = batch.rewards + batch.discounts * soft
    values = [q_by_hand(critics, i, o, a, "live", joint)[: len(a)] for i in range(loss.members)]
    critic_loss = sum(((value - goal) ** 2).mean() / 2 for value in values)
    found = {"critics": list(torch.autograd.grad(critic_loss, list(critics.q_parameters().values())))}  # type: ignore[arg-type]

    if loss.norm == "batch":  # the joint forward moved the running statistics before the policy is improved
        critics(both, batch_statistics=True)
    action, logp = policy_by_hand(stage, o, noise[0])
    q = torch.stack([q_by_hand(critics, i, o, action, "fixed") for i in range(loss.members)])
    worth = q.min(0).values if loss.actor_value == "min" else q.mean(0)
    actor_loss = (alpha.detach() * logp - worth).mean()
    found["policy"] = list(torch.autograd.grad(actor_loss, list(stage.network.parameters()), retain_graph=True))
    if loss.learn_alpha:
        alpha_loss = -(critics.log_alpha * (logp.detach() - 2.0)).mean()  # H = -2, the dimensions of an action
        found["alpha"] = list(torch.autograd.grad(alpha_loss, [critics.log_alpha]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_joint_backward_are_those_of_the_published_losses(kind: str) -> None:
    settings, batch = KINDS[kind], transitions()
    stage = stage_with_critics(SAC(**settings))
    expected = gradients_by_hand(settings, stage, batch)
    stage = stage_with_critics(SAC(**settings))  # with running statistics that nobody moved
    critics = critics_of(stage)
    loss = SAC(**settings).transition_loss(stage, batch, generator()).loss
    loss.backward()
    groups = {"critics": critics.q_parameters().values(), "policy": stage.network.parameters()}
    for name, parameters in {**groups, "alpha": [critics.log_alpha]}.items():
        ours = [parameter.grad for parameter in parameters]
        if name not in expected:
            assert ours == [None]
            continue
        for mine, other in zip(ours, expected[name], strict=True):
            assert mine is not None and torch.allclose(mine, other, atol=1e-6, rtol=1e-4), name


def test_targets_move_by_tau_and_start_equal() -> None:
    stage = stage_with_critics(SAC())
    critics = critics_of(stage)
    name = "layers.0.weight"
    start, live = critics.get_buffer(target_name(name)).clone(), critics.get_parameter(name)
    assert torch.equal(start, live)
    with torch.no_grad():
        live += 1.0
    critics.move_targets(0.25)
    assert torch.allclose(critics.get_buffer(target_name(name)), start + 0.25)


def test_the_temperature_rests_where_the_entropy_is_the_target() -> None:
    stage = stage_with_critics(SAC())
    parts = SAC().transition_loss(stage, transitions(), generator()).parts
    resting = SAC(target_entropy=float(parts["entropy"]))
    loss = resting.transition_loss(stage, transitions(), generator()).loss
    loss.backward()
    assert critics_of(stage).log_alpha.grad == pytest.approx(0.0, abs=1e-6)
    for shift, sign in ((1.0, -1.0), (-1.0, 1.0)):  # too little entropy raises the temperature, too much lowers it
        critics_of(stage).log_alpha.grad = None
        wanted = SAC(target_entropy=float(parts["entropy"]) + shift)
        wanted.transition_loss(stage, transitions(), generator()).loss.backward()
        assert float(critics_of(stage).log_alpha.grad) * sign > 0  # type: ignore[arg-type]


def affine_norm() -> tuple[RunningNorm, Tensor, Tensor]:
    """A normalization with statistics of its own, and its scale and shift [1, 1, 3]."""
    norm = RunningNorm(1, 3)
    norm.get_buffer("mean").fill_(0.2)
    norm.get_buffer("variance").fill_(1.5)
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([0.5, 1.0, -2.0]))
        norm.shift.copy_(torch.tensor([0.3, 0.0, 1.0]))
    return norm, norm.scale, norm.shift


@pytest.mark.parametrize("by_batch", [True, False])
def test_before_it_is_warm_the_normalization_is_that_of_torch(by_batch: bool) -> None:
    norm, scale, shift = affine_norm()
    x = torch.randn(1, 64, 3, generator=generator()).requires_grad_()
    means, variances = norm.get_buffer("mean").flatten().clone(), norm.get_buffer("variance").flatten().clone()
    expected = batch_norm(x[0], means, variances, scale.flatten(), shift.flatten(), training=by_batch, momentum=0.01)
    found = (norm.batch if by_batch else norm.fixed)(x, scale, shift)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(norm.get_buffer("mean").flatten(), means)
    inputs, seen = (x, scale, shift), torch.randn(64, 3, generator=generator())
    for own, theirs in zip(
        torch.autograd.grad(found, inputs, seen), torch.autograd.grad(expected, inputs, seen), strict=True
    ):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


def test_renormalization_gives_the_running_normalization_once_it_is_warm() -> None:
    norm, scale, shift = affine_norm()
    norm.get_buffer("count").fill_(norm.warmup)
    x = torch.randn(1, 64, 3, generator=generator())
    expected = norm.fixed(x, scale, shift)
    # r and d within their bounds cancel the statistics of the batch
    torch.testing.assert_close(norm.batch(x, scale, shift), expected, atol=1e-5, rtol=1e-5)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="members"):
        SAC(members=2, subset=3)
    with pytest.raises(IncompatibleError, match="target=live"):
        SAC(norm="batch")


def test_the_initial_temperature_is_alpha() -> None:
    assert critics_of(stage_with_critics(SAC(alpha=0.2))).log_alpha.item() == pytest.approx(math.log(0.2))
