"""A policy that chooses the noise of a frozen flow policy. DSRL, Wagenmaker et al. 2025, arXiv:2506.15799.

    o --trained--> u,  w = bound tanh(u) --frozen, deterministic chain--> actions of the environment

A policy of images and instructions is steered by what it makes of them itself: o is then the vectors among its
observations and its own state `HIDDEN`, which is what the store keeps and what critics read.

The frozen policy is part of the environment that the trained one acts in, and no gradient passes through it. The
log-prob and what critics read are those of tanh(u), so SAC needs nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from unirl.config.errors import IncompatibleError
from unirl.models.policies.flow import Features, FlowChain
from unirl.models.policies.networks import (
    HIDDEN,
    Activation,
    ObservationEncoder,
    Outputs,
    PolicyNetwork,
    Shapes,
    SquashedGaussianPolicy,
)
from unirl.models.policies.stage import ActionStage
from unirl.types.device import to_host
from unirl.types.environments import INSTRUCTION, ContinuousActions, Observations
from unirl.types.facts import ActionFacts

SMALLEST_STD = 1e-6
"""A number whose std is smaller is not scaled."""


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
        assert isinstance(frozen.policy, FlowChain)
        self.chain = frozen.policy

    def instructions(self, texts: Sequence[str]) -> Observations:
        return self.frozen.instructions(texts)

    @torch.no_grad()
    def encode(self, observations: Observations) -> Observations:
        if self.facts.encoded is None:
            return super().encode(observations)
        read = self._read(observations, self._features(observations))
        return dict(zip(read, to_host(list(read.values())), strict=True))

    @torch.no_grad()
    def decide(self, observations: Observations, noise: Tensor, deterministic: bool = False) -> Outputs:
        features = self._features(observations)
        read = self._read(observations, features)
        outputs = self._forward(read, noise=noise, deterministic=deterministic)
        found = {"actions": outputs["actions"], "logp": outputs["logp"]}
        found["executed"] = self._end(features, self.policy.executed(outputs["actions"]))
        if self.facts.encoded is not None:
            found[HIDDEN] = read[HIDDEN]
        found = dict(zip(found, to_host(list(found.values())), strict=True))
        return found | {"executed": self.chain.executed(found["executed"])}

    @torch.no_grad()
    def steered(self, observations: Observations, chosen: Tensor) -> Tensor:
        """[N, C, A] the actions of the frozen policy for chosen numbers [N, 1, W] in (-1, 1)."""
        (points,) = to_host([self._end(self._features(observations), chosen)])
        return self.chain.executed(points)

    def _features(self, observations: Observations) -> Features:
        """The features that the frozen policy computes of observations [N, *shape], with rows that pad a forward."""
        shown = self._padded(observations, len(next(iter(observations.values()))), self._device())
        with self.frozen.autocast():
            return self.chain.parameters_of(shown)

    def _read(self, observations: Observations, features: Features) -> Observations:
        """What the trained policy is given: the observations, or their vectors and the frozen policy's normed state.

        That state has mean 0 and variance 1 in each row, whatever the scale of the frozen network.
        """
        if self.facts.encoded is None:
            return observations
        state = self.chain.states(features)[HIDDEN].float()
        normed = layer_norm(state, state.shape[1:])[: len(next(iter(observations.values())))]
        return {key: normed if key == HIDDEN else observations[key] for key in self.facts.encoded}

    def _end(self, features: Features, chosen: Tensor) -> Tensor:
        """[N, 1, D] the last point of the deterministic chain that starts at the chosen numbers [N, 1, W]."""
        count, size = len(chosen), self.chain.size
        start = self._rows(self.bound * chosen.repeat(1, 1, size // chosen.shape[2]), count, self._device())
        with self.frozen.autocast():
            return self.chain.likeliest(features, start)[:count, -1:]


def checked_chain(policy: PolicyNetwork, path: str) -> FlowChain:
    """The frozen policy. Raises IncompatibleError (2020) if it denoises nothing."""
    if not isinstance(policy, FlowChain):
        raise IncompatibleError(
            f"bundle.frozen={path}: a {type(policy).__name__} has no noise to choose. Give the folder of an exported "
            "flow policy (FlowBundle), quickstart, or the bundle of a flow policy such as Pi0Bundle"
        )
    return policy


def steered_facts(frozen: ActionFacts) -> ActionFacts:
    """The facts of the policy that steers one with the facts `frozen`.

    If that one reads images or text, it reads the vectors among the observations and the frozen policy's state.
    """
    shapes = frozen.observations
    vectors = {key: tuple(shape) for key, shape in shapes.items() if len(shape) != 3 and key != INSTRUCTION}
    return ActionFacts(
        family=SteeringPolicy.__name__,
        observations=shapes,
        actions=frozen.actions,
        chunk=frozen.chunk,
        is_squashed=True,
        has_entropy=False,
        encoded=None if len(vectors) == len(shapes) else vectors | {HIDDEN: (frozen.hidden_size,)},
        batch_multiple=frozen.batch_multiple,
    )


def statistics_for(encoder: ObservationEncoder, chain: FlowChain) -> dict[str, Tensor]:
    """Mean and std of the vectors that both policies read, in the data of the frozen one, by name in `encoder`."""
    found = {name.removeprefix("encoder."): tensor for name, tensor in chain.named_buffers()}
    shared = {name: found[name] for name, _ in encoder.named_buffers() if name in found}
    # The std of a number that never changed is 0.
    return {name: t.where(t > SMALLEST_STD, 1.0) if name.endswith("_std") else t for name, t in shared.items()}
