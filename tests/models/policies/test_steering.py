"""DSRL: SAC over the noise of a frozen flow policy, which is SAC in an environment behind that policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.off_policy import transitions
from unirl.algorithms.sac import SAC, critics_of
from unirl.config.errors import IncompatibleError
from unirl.models.policies.bundle import FlowBundle, GaussianBundle, PolicyBundle, SteeredBundle
from unirl.models.policies.steering import SteeredStage
from unirl.types.environments import ContinuousActions, Observations
from unirl.types.transitions import Transitions

SHIFT = torch.tensor([0.5, -0.25, 0.125, 1.0])


def flow(folder: Path, shift: Tensor | None = None) -> str:
    """A flow policy of chunks of 2 actions of 2 numbers. With a velocity of -shift everywhere, it is w + shift."""
    bundle = FlowBundle(seed=4, observations=2, actions=2, chunk=2, num_steps=4, width=8)
    network = bundle.trainable()
    with torch.no_grad():
        network.get_parameter("output_layer.weight").normal_(std=0.5)
        if shift is not None:
            network.get_parameter("output_layer.weight").zero_()
            network.get_parameter("output_layer.bias").copy_(-shift)
    return str(bundle.write(folder, dict(network.state_dict())))


def stage_of(bundle: PolicyBundle) -> SteeredStage:
    stage = bundle.stage()
    assert isinstance(stage, SteeredStage)
    return stage


def observed(count: int) -> Observations:
    return {"state": torch.randn(count, 2, generator=torch.Generator().manual_seed(8))}


def test_an_affine_frozen_policy_makes_it_sac_behind_that_map(tmp_path: Path) -> None:
    """The same decisions, log-probs, losses and gradients as SAC on four numbers, and the actions are their image."""
    steered = SteeredBundle(seed=3, frozen=flow(tmp_path, SHIFT), bound=2.0, width=8)
    plain = GaussianBundle(seed=3, observations=2, actions=4, squashed=True, width=8, activation="relu")
    plain.trainable().load_state_dict(steered.trainable().state_dict())
    stages = (stage_of(steered), plain.stage())
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    ours, theirs = (stage.decide(observed(6), noise) for stage in stages)
    assert torch.equal(ours["actions"], theirs["actions"]) and torch.equal(ours["logp"], theirs["logp"])
    expected = (2.0 * theirs["executed"][:, 0] + SHIFT).unflatten(1, (2, 2))
    torch.testing.assert_close(ours["executed"], expected)

    drawn = transitions()
    batch = Transitions.of_tensors({**drawn.tensors(), "actions": drawn.actions.repeat(1, 2)})
    results = []
    for stage in stages:
        loss = SAC()
        stage.value_head = loss.build_head(stage, 8, seed=3)
        result = loss.transition_loss(stage, batch, torch.Generator().manual_seed(5))
        result.loss.backward()
        modules = (stage.network, critics_of(stage))
        grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
        results.append((result.loss.detach(), grads))
    assert torch.equal(results[0][0], results[1][0]) and len(results[0][1]) == len(results[1][1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_actions_are_the_deterministic_chain_of_the_frozen_policy(tmp_path: Path, shared: bool) -> None:
    path = flow(tmp_path)
    stage = stage_of(SteeredBundle(frozen=path, bound=1.2, shared=shared, width=8))
    size = stage.policy.decision_size
    assert size == (2 if shared else 4) and stage.facts.chunk == 2 and stage.facts.actions == ContinuousActions(2)
    decided = stage.decide(observed(5), torch.randn(5, size))
    w = 1.2 * decided["actions"].tanh()
    start = w.repeat(1, 2) if shared else w
    noise = torch.cat([start[:, None], torch.zeros(5, 3, 4)], 1)
    expected = PolicyBundle.from_files(path=path).stage().decide(observed(5), noise, deterministic=True)
    assert torch.equal(decided["executed"], expected["executed"])


def test_only_the_steering_policy_is_trained_and_replays(tmp_path: Path) -> None:
    bundle = SteeredBundle(frozen=flow(tmp_path), width=8)
    assert not any(p.requires_grad for p in bundle.inner.trainable().parameters())
    stage = bundle.stage()
    decided = stage.decide(observed(5), torch.randn(5, 4))
    again = stage._forward(observed(5), actions=decided["actions"])["logp"]
    assert torch.equal(again, decided["logp"]) and again.requires_grad


def test_an_export_has_both_policies(tmp_path: Path) -> None:
    bundle = SteeredBundle(seed=1, frozen=flow(tmp_path / "flow"), bound=0.7, width=8)
    state = {name: tensor + 0.1 for name, tensor in bundle.trainable().state_dict().items()}
    folder = bundle.write(tmp_path / "export", state)
    bundle.trainable().load_state_dict(state)
    moved = folder.rename(tmp_path / "moved")
    (tmp_path / "flow").rename(tmp_path / "elsewhere")
    again, noise = PolicyBundle.from_files(path=str(moved)), torch.randn(5, 4)
    ours, theirs = (one.stage().decide(observed(5), noise)["executed"] for one in (bundle, again))
    assert torch.equal(ours, theirs)
    planned = PolicyBundle.facts_from({"path": str(moved)})
    assert replace(planned, batch_multiple=bundle.facts.batch_multiple) == bundle.facts


def test_a_policy_without_noise_is_refused(tmp_path: Path) -> None:
    plain = GaussianBundle(observations=2, actions=2, width=8)
    path = str(plain.write(tmp_path, dict(plain.trainable().state_dict())))
    with pytest.raises(IncompatibleError, match="a GaussianPolicy has no noise to choose"):
        SteeredBundle(frozen=path)


def test_sac_finds_the_noise_of_the_best_action(tmp_path: Path) -> None:
    """Decisions of one step with reward -|a - g|^2, g = w* + shift: the optimum is w*, whatever is observed."""
    best = torch.tensor([0.6, -0.8, 0.3, -0.2])
    bundle = SteeredBundle(seed=2, frozen=flow(tmp_path, SHIFT), bound=1.5, width=32)
    stage, loss = stage_of(bundle), SAC(alpha=0.02, learn_alpha=False)
    stage.value_head = loss.build_head(stage, 64, seed=3)
    draw = torch.Generator().manual_seed(0)
    seen = {"state": 0.1 * torch.randn(2048, 2, generator=draw)}
    actions = (2 * torch.rand(2048, 4, generator=draw) - 1).clamp(-0.999, 0.999).atanh()
    executed = stage.steered(seen, actions.tanh()[:, None]).flatten(1)
    store = Transitions(
        observations=seen, actions=actions, rewards=-(executed - best - SHIFT).square().sum(1),
        discounts=torch.zeros(2048), following=seen,
    )  # fmt: skip
    trained = [*bundle.trainable().parameters(), *critics_of(stage).parameters()]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    for _ in range(500):
        chosen = torch.randint(2048, (128,), generator=draw)
        batch = Transitions.of_tensors({k: v[chosen] for k, v in store.tensors().items()})
        optimizer.zero_grad()
        loss.transition_loss(stage, batch, draw).loss.backward()
        optimizer.step()
    done = stage.decide(seen, torch.zeros(2048, 4), deterministic=True)["executed"].flatten(1) - SHIFT
    assert (done - best).abs().mean(0).max() < 0.15
