"""Samples of earlier weights on a task with a known best action: what corrects for them, and what happens without.

The policy is N(mu, 1), and an action a has the reward -c (a - BEST)^2 / 2, so the policy gradient is c (BEST - mu).
With steps of size h / c, weights that learn from samples of k steps before follow x(t + 1) = x(t) - h x(t - k) for
the distance x = mu - BEST, which decays if and only if h < 2 sin(pi / (2 (2 k + 1))). Weights that correct for the age
follow x(t + 1) = (1 - h) x(t), whatever k is. Actions are the nodes of a quadrature, so nothing is random.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unirl.algorithms.action_ppo import ActionGRPO
from unirl.algorithms.shared.mismatch import TokenTIS
from unirl.models.policies.networks import GaussianPolicy
from unirl.models.policies.stage import ActionStage
from unirl.types.environments import ContinuousActions
from unirl.types.facts import ActionFacts
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import ActionSegment

BEST, START, CURVATURE, NODES = 0.7, -0.3, 2.0, 48


def limit(staleness: int) -> float:
    """The largest h with which samples of `staleness` steps before can be taken for samples of the weights."""
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))


class Learner:
    """Gradient ascent on the mean of a Gaussian policy, by a loss of this package and a quadrature over actions."""

    def __init__(self, loss: ActionGRPO, h: float) -> None:
        actions = ContinuousActions(1)
        self.loss, self.rate = loss, h / CURVATURE
        self.network = GaussianPolicy({"state": (1,)}, actions, 1, 0, "tanh", seed=0)
        facts = ActionFacts(
            family="policy", observations={"state": (1,)}, actions=actions, has_entropy=True, batch_multiple=1
        )
        self.stage = ActionStage(self.network, facts, 0, "tanh")
        with torch.no_grad():
            self.network.output_layer.weight.zero_()
            self.network.output_layer.bias.fill_(START)

    @property
    def mean(self) -> float:
        return float(self.network.output_layer.bias.detach())

    def samples(self, mean: float) -> RolloutTrack:
        """The nodes of N(mean, 1), whose weights are their probabilities; advantages are rewards minus their mean."""
        places, weights = np.polynomial.hermite_e.hermegauss(NODES)
        actions = torch.from_numpy(mean + places).float()[:, None]
        weight = torch.from_numpy(weights / weights.sum()).float()
        rewards = -CURVATURE * (actions[:, 0] - BEST) ** 2 / 2
        ids = [str(i) for i in range(NODES)]
        segment = ActionSegment(
            observations={"state": torch.zeros(NODES, 1)},
            actions=actions,
            logp=-((actions[:, 0] - mean) ** 2) / 2 - math.log(2 * math.pi) / 2,
            loss_mask=torch.ones(NODES, dtype=torch.bool),
            offsets=torch.arange(NODES + 1),
            finished=torch.ones(NODES, dtype=torch.bool),
            anchors={},
            rewards=rewards,
            terminated=torch.ones(NODES, dtype=torch.bool),
            truncated=torch.zeros(NODES, dtype=torch.bool),
            success=torch.zeros(NODES, dtype=torch.bool),
            num_steps=torch.ones(NODES, dtype=torch.int64),
        )
        return RolloutTrack(
            sample_ids=ids, group_ids=ids, conditions={}, segment=segment, weight=weight,
            advantages=rewards - (weight * rewards).sum(), weight_version=torch.zeros(NODES, dtype=torch.int64),
        )  # fmt: skip

    def step(self, sampled_from: float) -> None:
        """One step on samples of N(sampled_from, 1)."""
        self.network.zero_grad()
        self.loss.loss(self.stage, self.samples(sampled_from), (0,)).loss.backward()
        bias = self.network.output_layer.bias
        with torch.no_grad():
            bias -= self.rate * bias.grad


def distances(loss: ActionGRPO, h: float, staleness: int, steps: int) -> list[float]:
    """mu - BEST after each step, if each step learns from samples of `staleness` steps before."""
    learner = Learner(loss, h)
    means = [learner.mean] * (staleness + 1)
    for _ in range(steps):
        learner.step(means[-1 - staleness])
        means.append(learner.mean)
    return [mean - BEST for mean in means[staleness:]]


def recursion(h: float, staleness: int, steps: int) -> list[float]:
    x = [START - BEST] * (staleness + 1)
    for _ in range(steps):
        x.append(x[-1] - h * x[-1 - staleness])
    return x[staleness:]


UNCORRECTED = ActionGRPO(old_logp_source="replay")
CLIPPED = ActionGRPO(old_logp_source="rollout")
WEIGHTED = ActionGRPO(old_logp_source="replay", mismatch=TokenTIS(cap=1e9))


@pytest.mark.parametrize(("staleness", "h"), [(0, 0.5), (1, 0.5), (2, 0.5), (4, 0.3)])
def test_stale_samples_taken_for_fresh_ones_follow_the_delayed_recursion(staleness, h) -> None:
    assert distances(UNCORRECTED, h, staleness, 40) == pytest.approx(recursion(h, staleness, 40), abs=2e-4)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_importance_weights_restore_the_recursion_of_fresh_samples(staleness) -> None:
    assert distances(WEIGHTED, 0.5, staleness, 40) == pytest.approx(recursion(0.5, 0, 40), abs=2e-3)


@pytest.mark.parametrize("staleness", [2, 4])
def test_beyond_the_limit_only_the_corrected_run_reaches_the_best_action(staleness) -> None:
    """The ratio to the weights that sampled stays near it: its clip bounds how far samples move the policy."""
    h = 1.3 * limit(staleness)
    fresh, stale = distances(UNCORRECTED, h, 0, 60), distances(UNCORRECTED, h, staleness, 60)
    weighted, clipped = distances(WEIGHTED, h, staleness, 60), distances(CLIPPED, h, staleness, 60)
    assert abs(fresh[-1]) < 1e-3 and abs(weighted[-1]) < 1e-2
    assert max(map(abs, clipped[-20:])) < 0.2
    assert max(map(abs, stale[-20:])) > abs(START - BEST)  # farther away than it began


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_below_the_limit_the_uncorrected_run_arrives_later(staleness) -> None:
    h = 0.8 * limit(staleness)
    fresh, stale = (distances(UNCORRECTED, h, age, 80) for age in (0, staleness))
    assert max(map(abs, stale[-10:])) < 0.1
    assert max(map(abs, stale[20:])) > 10 * max(map(abs, fresh[20:]))
