"""IQL against a transcription of its equations, SciPy's expectiles, and problems whose solutions are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import expectile
from torch import Tensor

from tests.algorithms.test_lqr import SAC_BOUND, linear_system, share_of
from tests.off_policy import squashed_pipeline, transitions
from unirl.algorithms.iql import IQL, value_critics_of
from unirl.config.errors import IncompatibleError
from unirl.models.policies.bundle import CategoricalBundle, FlowBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.networks import GaussianPolicy
from unirl.models.policies.stage import ActionStage
from unirl.types.environments import EpisodeStart
from unirl.types.transitions import Transitions


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def with_critics(stage: ActionStage, loss: IQL) -> ActionStage:
    stage.value_head = loss.build_head(stage, 8, seed=3)
    return stage


def executed_transitions(**columns: Tensor) -> Transitions:
    """Transitions whose actions [N, 1, 2] are those of the environment."""
    drawn = transitions()
    return Transitions.of_tensors(drawn.tensors() | {"actions": drawn.actions.tanh()[:, None]} | columns)


@pytest.mark.parametrize("weights", [None, torch.linspace(0.2, 1.0, 12)], ids=["uniform", "prioritised"])
@pytest.mark.parametrize("settings", [{}, {"members": 3, "norm": "layer", "expectile": 0.9, "beta": 0.5}])
def test_gradients_are_those_of_the_three_published_losses(settings: dict[str, Any], weights: Tensor | None) -> None:
    loss = IQL(**settings)
    stage = with_critics(squashed_pipeline().stage, loss)
    head, policy = value_critics_of(stage), stage.network
    with torch.no_grad():  # values that are not 0, and targets that lag
        head.value.output_layer.weight.normal_(generator=generator())  # type: ignore[union-attr]
        head.critics.get_parameter("layers.0.weight").mul_(1.5)
    batch = executed_transitions(**({} if weights is None else {"weights": weights}))
    importance = torch.ones(12) if weights is None else weights
    o, after, a = batch.observations, batch.following, batch.actions
    pairs = torch.cat([o["state"], a[:, 0]], 1)
    v, q = head.value(o), head.critics(pairs)
    u = (head.critics(pairs, weights="target").min(0).values - v).detach() + (v.detach() - v)
    value_loss = sum((abs(loss.expectile - float(x < 0)) * x**2 * w for x, w in zip(u, importance, strict=True)))
    goal = (batch.rewards + batch.discounts * head.value(after)).detach()
    critic_loss = sum((importance * (each - goal) ** 2).mean() / 2 for each in q)
    bounded = [min(float(torch.exp(loss.beta * x.detach())), loss.max_weight) for x in u]
    logp = policy(o, actions=torch.atanh(a[:, 0].clamp(-0.999, 0.999)))["logp"]
    actor_loss = -(torch.tensor(bounded) * logp).mean()
    groups = {
        "critics": (critic_loss, list(head.critics.q_parameters().values())),
        "value": (value_loss / 12, list(head.value.parameters())),
        "policy": (actor_loss, list(policy.parameters())),
    }
    expected = {name: torch.autograd.grad(each, over, retain_graph=True) for name, (each, over) in groups.items()}
    found = loss.transition_loss(stage, batch, generator())
    found.loss.backward()
    for name, (_, parameters) in groups.items():
        for mine, other in zip(parameters, expected[name], strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, other, rtol=1e-4, atol=1e-6, msg=name)
    assert found.errors is not None
    torch.testing.assert_close(found.errors, (q - goal).detach().abs().mean(0))


def bandit(actions: Tensor, rewards: Tensor) -> Transitions:
    """Decisions in the same state, after which nothing follows."""
    state = {"state": torch.ones(len(actions), 1)}
    return Transitions(
        observations=state, actions=actions, rewards=rewards, discounts=torch.zeros(len(actions)), following=state
    )


def solved(loss: IQL, actions: Tensor, rewards: Tensor, steps: int = 600) -> tuple[ActionStage, Transitions]:
    """A Gaussian policy and its values after full-batch updates on a bandit."""
    stage = GaussianBundle(observations=1, actions=1, width=16).stage()
    stage.value_head = loss.build_head(stage, 64, seed=3)
    batch, head = bandit(actions, rewards), value_critics_of(stage)
    parameters = [*stage.network.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss.transition_loss(stage, batch, generator()).loss.backward()
        optimizer.step()
        loss.after_update(stage)
        schedule.step()
    return stage, batch


@pytest.mark.parametrize(("share", "beta"), [(0.5, 1.0), (0.8, 3.0)])
def test_a_bandit_is_solved_as_scipy_and_the_weighted_mean_say(share: float, beta: float) -> None:
    """V is the expectile of the rewards, and the policy the Gaussian that is nearest to the weighted actions."""
    actions = torch.linspace(-1, 1, 9)[:, None, None]
    rewards = -(actions[:, 0, 0] - 0.5).square()
    loss = IQL(expectile=share, beta=beta, tau=0.05)
    stage, batch = solved(loss, actions, rewards)
    head, policy = value_critics_of(stage), stage.policy
    assert isinstance(policy, GaussianPolicy)
    wanted = expectile(rewards.numpy(), share)
    assert head.value(batch.observations)[0].item() == pytest.approx(wanted, abs=0.01)
    weights = (beta * (rewards - wanted)).exp()
    mean = (weights * actions[:, 0, 0]).sum() / weights.sum()
    variance = (weights * (actions[:, 0, 0] - mean).square()).sum() / weights.sum()
    with torch.no_grad():
        found = stage.network(batch.observations, noise=torch.zeros(9, 1), deterministic=True)["actions"]
    assert found[0].item() == pytest.approx(mean.item(), abs=0.01)
    assert policy.log_std.exp().item() == pytest.approx(variance.sqrt().item(), abs=0.01)


def random_decisions(episodes: int) -> Transitions:
    """Episodes of a linear system with uniform actions."""
    environment, slots, draw = linear_system(SAC_BOUND), list(range(episodes)), torch.Generator().manual_seed(0)
    state = environment.reset(slots, [EpisodeStart(seed=1000 + slot) for slot in slots])["state"]
    parts = []
    for time in range(20):
        actions = 2 * torch.rand(episodes, 1, generator=draw) - 1
        step = environment.step(slots, actions)
        columns = (state, actions[:, None], step.rewards, torch.full((episodes,), 0.95 * (time < 19)))
        parts.append((*columns, step.observations["state"]))
        state = step.observations["state"]
    states, actions, rewards, discounts, following = (torch.cat(each) for each in zip(*parts, strict=True))
    return Transitions(
        observations={"state": states},
        actions=actions,
        rewards=rewards,
        discounts=discounts,
        following={"state": following},
    )


@pytest.mark.slow
@pytest.mark.seeds
def test_random_decisions_teach_the_best_policy_of_a_linear_system(seed: int) -> None:
    """After 1,000 updates on 4,000 decisions. Imitation of all decisions alike closes nothing of the way."""
    loss = IQL(gamma=0.95, expectile=0.8, beta=5.0, tau=0.02, norm="layer")
    bundle = GaussianBundle(observations=3, actions=1, width=64, activation="relu", squashed=True, seed=seed)
    stage, data, draw = bundle.stage(), random_decisions(200), torch.Generator().manual_seed(seed)
    stage.value_head = loss.build_head(stage, 64, seed)
    optimizer = torch.optim.Adam([*stage.network.parameters(), *stage.value_head.parameters()], 1e-3)
    for _ in range(1000):
        chosen = torch.randint(len(data), (256,), generator=draw)
        batch = Transitions.of_tensors({name: values[chosen] for name, values in data.tensors().items()})
        optimizer.zero_grad()
        loss.transition_loss(stage, batch, draw).loss.backward()
        optimizer.step()
        loss.after_update(stage)
    share = share_of(stage.policy, SAC_BOUND)
    assert 0.95 < share <= 1.0, share


def test_weights_are_bounded_and_beta_of_zero_is_behaviour_cloning() -> None:
    batch = executed_transitions()
    stage = with_critics(squashed_pipeline().stage, IQL())
    with torch.no_grad():
        value_critics_of(stage).value.output_layer.bias.fill_(-1000.0)  # type: ignore[union-attr]
    bounded = IQL(max_weight=7.0).transition_loss(stage, batch, generator()).parts
    cloned = IQL(beta=0.0).transition_loss(stage, batch, generator()).parts
    imitation = stage.policy.imitation(batch.observations, batch.actions, batch.actions, batch.rewards).mean()
    assert float(bounded["weight"]) == 7.0
    torch.testing.assert_close(bounded["actor"], 7.0 * imitation)
    torch.testing.assert_close(cloned["actor"], imitation)


@pytest.mark.parametrize(
    "bundle",
    [GaussianBundle(observations=2, actions=2, width=8), FlowBundle(observations=2, actions=2, chunk=1, width=8)],
    ids=["gaussian", "flow"],
)
def test_policies_that_imitate_get_a_gradient(bundle: PolicyBundle) -> None:
    stage = with_critics(bundle.stage(), IQL())
    IQL().transition_loss(stage, executed_transitions(), generator()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stage.network.parameters())


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        (FlowBundle(observations=2, actions=2, chunk=3, width=8), "bundle.chunk=3. Set it to 1"),
        (CategoricalBundle(observations=2, actions=2, width=8), "imitates continuous actions"),
        (GaussianBundle(observations={"pixels": (3, 24, 24)}, actions=2, width=8), "pixels is an image"),
    ],
    ids=["chunk", "discrete", "image"],
)
def test_policies_that_cannot_learn_are_refused(bundle: PolicyBundle, words: str) -> None:
    with pytest.raises(IncompatibleError, match=words):
        IQL().check_facts(bundle.stage().facts)


def test_data_without_rewards_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="no rewards, from which IQL learns"):
        IQL().check_demonstrations(has_rewards=False)
