"""Bundles of policies: a network with new weights, or those of an exported policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from unirl.config.errors import InvalidValueError
from unirl.models.base import Bundle
from unirl.models.chunks import batch_multiple
from unirl.models.policies.flow import FlowPolicy
from unirl.models.policies.networks import (
    Activation,
    CategoricalPolicy,
    GaussianPolicy,
    PolicyNetwork,
    SquashedGaussianPolicy,
)
from unirl.models.policies.stage import ActionStage
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import key_seed
from unirl.types.device import CPU
from unirl.types.environments import STATE, ContinuousActions, DiscreteActions
from unirl.types.facts import ActionFacts

POLICY = "policy"
Shapes = Mapping[str, tuple[int, ...]]


class PolicyBundle(Bundle):
    """The base of bundles with one policy network."""

    toy: ClassVar[Mapping[str, object]] = {"width": 16}
    facts: ActionFacts

    def __init__(
        self, network: PolicyNetwork, shapes: Shapes, *, device: torch.device, depth: int, activation: Activation
    ) -> None:
        self.depth, self.activation = depth, activation
        facts = ActionFacts(
            family=type(network).__name__,
            observations=dict(shapes),
            actions=network.actions,
            chunk=network.chunk,
            batch_multiple=batch_multiple(device),
        )
        super().__init__({POLICY: network}, facts, dtype=torch.float32, device=device)

    def stage(self) -> ActionStage:
        return ActionStage(self.trainable(), self.facts, self.depth, self.activation)


def shapes_of(observations: Mapping[str, Sequence[int]] | int) -> Shapes:
    """The shapes of the setting `bundle.observations`: one number is the length of the observation `state`."""
    shapes = (
        {STATE: (observations,)} if isinstance(observations, int) else {k: tuple(v) for k, v in observations.items()}
    )
    if not shapes or any(size < 1 for shape in shapes.values() for size in shape):
        raise InvalidValueError(
            f"bundle.observations={observations}: write the length of the environment's observation, or its shape by "
            "key, such as {pixels: [3, 84, 84]}"
        )
    return shapes


def positive(**values: int) -> None:
    """Raises InvalidValueError for a setting of the bundle below 1."""
    for name, value in values.items():
        if value < 1:
            raise InvalidValueError(f"bundle.{name} must be >= 1, got {value}")


class CategoricalBundle(PolicyBundle):
    """A policy of discrete actions."""

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        width: int = 64,
        depth: int = 2,
        activation: Activation = "tanh",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: number of discrete actions.
            width: units of a layer.
            depth: layers before the output.
            activation: after each layer.
        """
        positive(actions=actions, width=width, depth=depth)
        shapes = shapes_of(observations)
        space = DiscreteActions(actions)
        network = CategoricalPolicy(shapes, space, width, depth, activation, key_seed(seed, POLICY))
        super().__init__(network, shapes, device=device, depth=depth, activation=activation)


class GaussianBundle(PolicyBundle):
    """A policy of continuous actions: a Gaussian, whose samples the environment clips to [-1, 1]."""

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        squashed: bool = False,
        log_std: float = 0.0,
        width: int = 64,
        depth: int = 2,
        activation: Activation = "tanh",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: A, the dimensions of an action.
            squashed: tanh of a Gaussian whose std depends on the observation, as for SAC.
            log_std: initial log of the std, of a policy that is not squashed.
            width: units of a layer.
            depth: layers before the output.
            activation: after each layer.
        """
        positive(actions=actions, width=width, depth=depth)
        shapes, space, start = shapes_of(observations), ContinuousActions(actions), key_seed(seed, POLICY)
        network: PolicyNetwork
        if squashed:
            network = SquashedGaussianPolicy(shapes, space, width, depth, activation, start)
        else:
            network = GaussianPolicy(shapes, space, width, depth, activation, start, log_std)
        super().__init__(network, shapes, device=device, depth=depth, activation=activation)


class FlowBundle(PolicyBundle):
    """A policy of continuous actions that denoises them: `FlowPolicy`."""

    def __init__(
        self,
        device: torch.device = CPU,
        seed: int = 0,
        *,
        observations: Mapping[str, tuple[int, ...]] | int,
        actions: int,
        chunk: int = 1,
        num_steps: int = 4,
        eta: float = 0.3,
        width: int = 128,
        depth: int = 2,
        activation: Activation = "silu",
    ) -> None:
        """
        Args:
            seed: the seed of the run, from which the initial weights are drawn.
            observations: length of the observation `state`, or shapes by key.
            actions: A, the dimensions of an action.
            chunk: actions of one decision, C. The environment takes them one after another.
            num_steps: K, the denoising steps. All but the last are stochastic.
            eta: strength of their noise (FlowSDEStrategy).
            width: units of a layer.
            depth: layers between the features of the observation and the output.
            activation: after each layer.
        """
        positive(actions=actions, chunk=chunk, width=width, depth=depth)
        if num_steps < 2:
            raise InvalidValueError(
                f"bundle.num_steps must be >= 2, got {num_steps}: the last step is not stochastic, so one step alone "
                "has no log-prob"
            )
        shapes, space, start = shapes_of(observations), ContinuousActions(actions), key_seed(seed, POLICY)
        network = FlowPolicy(
            shapes,
            space,
            width,
            depth,
            activation,
            start,
            num_steps=num_steps,
            chunk=chunk,
            kernel=FlowSDEStrategy(eta=eta),
        )
        super().__init__(network, shapes, device=device, depth=depth, activation=activation)
