"""One update of SAC beside that of Stable-Baselines3, with equal weights, minibatches and noise."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.off_policy import squashed_pipeline, transitions
from unirl.algorithms.base import START
from unirl.algorithms.sac import SAC, critics_of
from unirl.algorithms.shared.critic_ensemble import target_name
from unirl.models.policies.networks import PolicyNetwork
from unirl.sde.noise import key_seed
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import ValueConfig
from unirl.train.replay_stack import ReplayStack
from unirl.types.results import values

sb3 = pytest.importorskip("stable_baselines3")
RATE, GAMMA, TAU, ALPHA, WIDTH, COUNT = 1e-2, 0.9, 0.05, 0.3, 8, 12
ANY = 1e9
Layers = list[tuple[Tensor, Tensor]]
"""The weight [out, in] and the bias [out] of each layer."""


class Plane(gymnasium.Env[Any, Any]):
    """The spaces of the policies of `tests.off_policy`."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


def our_stack(is_adam: bool) -> ReplayStack:
    policy = squashed_pipeline()
    backend = FSDPBackend(
        policy.bundle,
        optimizer_cfg=OptimizerConfig(learning_rate=RATE),
        value_cfg=ValueConfig(learning_rate=RATE, width=WIDTH, max_grad_norm=ANY),
    )
    loss = SAC(gamma=GAMMA, tau=TAU, alpha=ALPHA)
    stack = ReplayStack(backend, loss, policy.stage, minibatch_size=COUNT, max_grad_norm=ANY)
    if not is_adam:
        groups = [{"params": group["params"]} for group in backend.optimizer.param_groups]
        backend.optimizer = torch.optim.SGD(groups, lr=RATE)  # type: ignore[assignment]
    stack.replay.add(transitions(3 * COUNT))
    return stack


def sac_of(stack: ReplayStack) -> SAC:
    assert isinstance(stack.loss, SAC)
    return stack.loss


def their_model(is_adam: bool) -> Any:
    model = sb3.SAC(
        "MlpPolicy", Plane(), learning_rate=RATE, gamma=GAMMA, tau=TAU, ent_coef=f"auto_{ALPHA}", device="cpu",
        buffer_size=COUNT, policy_kwargs={"net_arch": [WIDTH, WIDTH]},
    )  # fmt: skip
    model.actor.action_dist.epsilon = 0.0  # theirs adds 1e-6 inside a logarithm, where ours is exact
    model.set_logger(sb3.common.logger.Logger(None, []))
    if not is_adam:
        for owner in (model.actor, model.critic):
            owner.optimizer = torch.optim.SGD(owner.parameters(), lr=RATE)
        model.ent_coef_optimizer = torch.optim.SGD([model.log_ent_coef], lr=RATE)
    return model


def our_policy(network: PolicyNetwork) -> Layers:
    """The hidden layers, the mean, and the log of the std, which our output layer has side by side."""
    output = network.get_submodule("output_layer")
    assert isinstance(output, nn.Linear)
    hidden = [layer for layer in network.get_submodule("encoder.layers").children() if isinstance(layer, nn.Linear)]
    heads = zip(output.weight.detach().chunk(2), output.bias.detach().chunk(2), strict=True)
    return [*((layer.weight.detach(), layer.bias.detach()) for layer in hidden), *heads]


def our_critics(stack: ReplayStack, target: bool) -> Layers:
    """The layers of one critic after the other."""
    critics, found = critics_of(stack.stage), []
    layers = [*(f"layers.{i}" for i in range(len(critics.layers))), "output_layer"]
    for member in range(sac_of(stack).members):
        for layer in layers:
            names = [f"{layer}.weight", f"{layer}.bias"]
            weight, bias = (
                critics.get_buffer(target_name(name)) if target else critics.get_parameter(name).detach()
                for name in names
            )
            found.append((weight[member].T, bias[member, 0]))
    return found


def their_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def copy_to(layers: list[nn.Linear], source: Layers) -> None:
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, source, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def assert_equal(layers: list[nn.Linear], source: Layers) -> None:
    for layer, (weight, bias) in zip(layers, source, strict=True):
        torch.testing.assert_close(weight, layer.weight.detach(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(bias, layer.bias.detach(), atol=2e-6, rtol=1e-5)


def update_theirs(model: Any, stack: ReplayStack, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One update on the minibatch and with the noise of our next update; what it logs."""
    generator = torch.Generator().manual_seed(key_seed(stack.backend.seed, f"replay{stack.backend.updates}"))
    batch = stack.replay.sample(COUNT, generator).transitions
    noise = iter(torch.randn(2, COUNT, 2, generator=generator))
    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *_, **__: next(noise))
    sample = sb3.common.type_aliases.ReplayBufferSamples(
        observations=batch.observations["state"],
        actions=batch.actions.tanh(),
        next_observations=batch.following["state"],
        dones=(batch.discounts == 0).float()[:, None],
        rewards=batch.rewards[:, None],
        discounts=None,
    )
    monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: sample)
    model.train(1, COUNT)
    return dict(model.logger.name_to_value)


@pytest.mark.parametrize("is_adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("part", ["critics", "policy"])
def test_an_update_is_that_of_stable_baselines3(part: str, is_adam: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their policy is improved after their critics, so it is compared in an update that leaves their critics alone."""
    stack, model = our_stack(is_adam), their_model(is_adam)
    copy_to(their_layers(model.actor), our_policy(stack.stage.policy))
    copy_to(their_layers(model.critic), our_critics(stack, target=False))
    copy_to(their_layers(model.critic_target), our_critics(stack, target=True))
    if part == "policy":
        monkeypatch.setattr(model.critic.optimizer, "step", lambda: None)
    before = [weight.clone() for weight, _ in our_policy(stack.stage.policy)]

    logged = update_theirs(model, stack, monkeypatch)
    ours = values(stack._update_once(1, START))

    assert ours["train/q_loss"] == pytest.approx(logged["train/critic_loss"], rel=1e-5)
    assert ours["train/alpha"] == pytest.approx(logged["train/ent_coef"], rel=1e-6)
    assert critics_of(stack.stage).log_alpha.item() == pytest.approx(model.log_ent_coef.item(), abs=1e-6)
    if part == "critics":
        assert_equal(their_layers(model.critic), our_critics(stack, target=False))
        assert_equal(their_layers(model.critic_target), our_critics(stack, target=True))
    else:
        assert ours["train/actor_loss"] == pytest.approx(logged["train/actor_loss"], rel=1e-5)
        assert_equal(their_layers(model.actor), our_policy(stack.stage.policy))
        after = [weight for weight, _ in our_policy(stack.stage.policy)]
        assert max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)) > 1e-4
