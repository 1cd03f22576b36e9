"""A policy that chooses the noise of a frozen flow policy. DSRL, Wagenmaker et al. 2025, arXiv:2506.15799.

    o --trained--> u,  w = bound tanh(u) --frozen, deterministic chain--> actions of the environment

The frozen policy is part of the environment that the trained one acts in, and no gradient passes through it. The
log-prob and what critics read are those of tanh(u), so SAC needs nothing of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.config.errors import IncompatibleError
from unirl.models.policies.flow import FlowChain
from unirl.models.policies.networks import Activation, Outputs, PolicyNetwork, Shapes, SquashedGaussianPolicy
from unirl.models.policies.stage import ActionStage
from unirl.types.environments import ContinuousActions, Observations
from unirl.types.facts import ActionFacts


class SteeringPolicy(SquashedGaussianPolicy):
    """A squashed Gaussian over the noise of a flow policy, in units of the bound. u is recorded."""

    def __init__(
        self,
        shapes: Shapes,
        actions: ContinuousActions,
        chunk: int,
        noise_size: int,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        log_std: float,
    ) -> None:
        """
        Args:
            actions, chunk: those of the environment.
            noise_size: W, the numbers that are chosen.
        """
        super().__init__(shapes, ContinuousActions(noise_size), width, depth, activation, seed, log_std)
        self.actions, self.chunk = actions, chunk

    @property
    def decision_size(self) -> int:
        return self.noise_shape[0]

    def executed(self, actions: Tensor) -> Tensor:
        """[N, 1, W] tanh(u): what the frozen policy and critics get."""
        return super().executed(actions)

    def recorded(self, executed: Tensor) -> Tensor:
        return PolicyNetwork.recorded(self, executed)


class SteeredStage(ActionStage):
    """Decides with both policies, and replays with the trained one."""

    def __init__(
        self,
        network: PolicyNetwork,
        facts: ActionFacts,
        depth: int,
        activation: Activation,
        frozen: ActionStage,
        bound: float,
    ) -> None:
        super().__init__(network, facts, depth, activation)
        self.frozen, self.bound = frozen, bound

    @torch.no_grad()
    def decide(self, observations: Observations, noise: Tensor, deterministic: bool = False) -> Outputs:
        chosen = super().decide(observations, noise, deterministic)
        return chosen | {"executed": self.steered(observations, chosen["executed"])}

    @torch.no_grad()
    def steered(self, observations: Observations, chosen: Tensor) -> Tensor:
        """[N, C, A] the actions of the frozen policy for chosen numbers [N, 1, W] in (-1, 1)."""
        steps, size = self.frozen.policy.noise_shape
        start = self.bound * chosen[:, 0].repeat(1, size // chosen.shape[2])
        starts = torch.cat([start[:, None], start.new_zeros(len(start), steps - 1, size)], dim=1)
        return self.frozen.decide(observations, starts, deterministic=True)["executed"]


def checked_chain(policy: PolicyNetwork, path: str) -> FlowChain:
    """The frozen policy. Raises IncompatibleError (2020) if it denoises nothing."""
    if not isinstance(policy, FlowChain):
        raise IncompatibleError(
            f"bundle.frozen={path}: a {type(policy).__name__} has no noise to choose. Give the folder of an exported "
            "flow policy (FlowBundle), or quickstart"
        )
    return policy
