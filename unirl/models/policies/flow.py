"""A policy whose action is the end of a denoising chain: the transitions of images, over actions.

    x_K = noise -> x_{K-1} -> ... -> x_0 = the action (or chunk of actions),  v = network(o, x, sigma)

The chain is what is recorded, so its log-prob has the closed form of each transition (`unirl/sde/kernels.py`), and the
losses on decisions train it like any other policy: Flow-GRPO (arXiv:2505.05470) and ReinFlow (arXiv:2505.22094).
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from unirl.models.policies.networks import (
    ACTIVATIONS,
    HIDDEN,
    Activation,
    ObservationEncoder,
    Outputs,
    PolicyNetwork,
    Shapes,
    initialise,
)
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.environments import ContinuousActions, Observations
from unirl.types.protocols import Kernel

Features = tuple[Tensor, ...]
NUM_WAVES = 4
"""Frequencies of the encoding of a noise level."""


class FlowChain(PolicyNetwork):
    """Continuous actions by K denoising steps, of which all but the last are stochastic. The base of all flow policies.

    sigma runs from 1 to 0 in equal steps. The policy is the velocity v(o, x, sigma) with E[eps - a | x] as its target.
    Its parameters are a tuple of tensors [N, ...], the features of the observations, from which every step starts.
    """

    noise = "normal"

    def __init__(
        self, actions: ContinuousActions, *, size: int, num_steps: int, chunk: int, kernel: Kernel | None = None
    ) -> None:
        """
        Args:
            size: D, the numbers that are denoised, `width` for each action.
            num_steps: K.
            chunk: C, actions of one decision.
            kernel: of the stochastic steps. None: `FlowSDEStrategy`.
        """
        super().__init__()
        self.actions, self.chunk, self.num_steps, self.action_size = actions, chunk, num_steps, actions.size
        self.kernel: Kernel = kernel or FlowSDEStrategy(eta=0.3)
        self.size, self.width = size, size // chunk
        self.noise_shape = (num_steps, size)

    @abstractmethod
    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        """[N, D] the velocity at x [N, D] and noise levels sigma [N]."""

    @property
    def num_counted(self) -> int:
        """The numbers of a step whose log-prob counts."""
        return self.size

    def counted(self, x: Tensor) -> Tensor:
        """[N, num_counted] those numbers of x [N, D]."""
        return x

    def level(self, step: int) -> float:
        """sigma before denoising step `step`."""
        return 1.0 - step / self.num_steps

    def _chain(self, features: Features, noise: Tensor, stochastic: bool) -> Tensor:
        """[N, K + 1, D] the points of a chain that begins at noise[:, 0]."""
        points = [noise[:, 0]]
        for step in range(self.num_steps):
            x, level, after = points[-1], self.level(step), self.level(step + 1)
            v = self.velocity(features, x, x.new_full((len(x),), level))
            if stochastic and self.kernel.has_density(step, self.num_steps):
                points.append(self.kernel.transition(x, v, level, after).sample(noise[:, step + 1]))
            else:
                points.append(x + (after - level) * v)
        return torch.stack(points, dim=1)

    def draw(self, parameters: Features, noise: Tensor) -> Tensor:
        return self._chain(parameters, noise, stochastic=True)

    def likeliest(self, parameters: Features, noise: Tensor) -> Tensor:
        """[N, K + 1, D] the deterministic chain from the given start, since no end of a chain has a known density."""
        return self._chain(parameters, noise, stochastic=False)

    def log_prob(self, parameters: Features, actions: Tensor) -> Tensor:
        """[N] log-prob of the stochastic steps of recorded chains [N, K + 1, D], nats, given their start.

        It is the sum over the numbers that `counted` takes.
        """
        steps = [step for step in range(self.num_steps) if self.kernel.has_density(step, self.num_steps)]
        count, total = len(actions), actions.new_zeros(len(actions))
        if not steps:
            return total
        # No list becomes a tensor of the device here, for which the host would wait.
        levels = torch.stack([actions.new_full((), self.level(step)) for step in steps])
        x = torch.stack([actions[:, step] for step in steps], dim=1).flatten(0, 1)  # row by row, step by step
        features = tuple(part.repeat_interleave(len(steps), 0) for part in parameters)
        v = self.velocity(features, x, levels.repeat(count)).unflatten(0, (count, len(steps)))
        for i, step in enumerate(steps):
            start, speed, after = (self.counted(part) for part in (actions[:, step], v[:, i], actions[:, step + 1]))
            moved = self.kernel.transition(start, speed, self.level(step), self.level(step + 1))
            total = total + moved.log_prob(after) * self.num_counted
        return total

    def entropy(self, parameters: Features) -> Tensor:
        """[N] entropy of the noise of the stochastic steps, nats, which the weights do not change."""
        return parameters[0].new_full((len(parameters[0]),), self.noise_entropy(), dtype=torch.float32)

    def noise_entropy(self) -> float:
        """Sum over the stochastic steps of the entropy of N(., std^2 I), of the numbers that count."""
        stds = []
        zero = torch.zeros(1, 1, dtype=torch.float64)
        for step in range(self.num_steps):
            if self.kernel.has_density(step, self.num_steps):
                stds.append(float(self.kernel.transition(zero, zero, self.level(step), self.level(step + 1)).std))
        return self.num_counted * sum(math.log(std) + 0.5 * math.log(2 * math.pi * math.e) for std in stds)

    def executed(self, actions: Tensor) -> Tensor:
        return actions[:, -1].unflatten(1, (self.chunk, self.action_size))


class FlowPolicy(FlowChain):
    """A flow policy whose velocity is a network of layers over features of the observations. D = C A."""

    def __init__(
        self,
        shapes: Shapes,
        actions: ContinuousActions,
        width: int,
        depth: int,
        activation: Activation,
        seed: int,
        *,
        num_steps: int,
        chunk: int = 1,
        kernel: Kernel | None = None,
    ) -> None:
        """
        Args:
            num_steps: K.
            chunk: C, actions of one decision.
            kernel: of the stochastic steps. None: `FlowSDEStrategy`.
        """
        super().__init__(actions, size=actions.size * chunk, num_steps=num_steps, chunk=chunk, kernel=kernel)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObservationEncoder(shapes, width, 1, activation)
            layers: list[nn.Module] = []
            inputs = width + self.size + 1 + 2 * NUM_WAVES
            for _ in range(depth):
                layers += [nn.Linear(inputs, width), ACTIVATIONS[activation]()]
                inputs = width
            self.layers = nn.Sequential(*layers)
            self.output_layer = nn.Linear(width, self.size)
            initialise(self.encoder, math.sqrt(2))
            initialise(self.layers, math.sqrt(2))
            initialise(self.output_layer, 0.01)

    @property
    def hidden_size(self) -> int:
        return self.encoder.width

    def parameters_of(self, observations: Observations) -> Features:
        """One tensor [N, width] of features."""
        return (self.encoder(observations),)

    def states(self, parameters: Features) -> Outputs:
        """`HIDDEN`: the features."""
        return {HIDDEN: parameters[0]}

    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        (encoded,) = features
        waves = sigma[:, None] * math.pi * 2.0 ** torch.arange(NUM_WAVES, device=x.device)
        levels = torch.cat([sigma[:, None], waves.sin(), waves.cos()], dim=1)
        return self.output_layer(self.layers(torch.cat([encoded, x, levels], dim=1)))

    def imitation(self, observations: Observations, actions: Tensor, eps: Tensor, levels: Tensor) -> Tensor:
        """[N] flow-matching loss: mean over dimensions of (v(o, x, sigma) - (eps - a))^2 / 2.

        x = (1 - sigma) a + sigma eps. Lipman et al. 2023, arXiv:2210.02747.

        Args:
            actions: a [N, C, A], in [-1, 1].
            eps: [N, K, C A], of which the first entry is read.
            levels: sigma [N].
        """
        a, noise, sigma = actions.flatten(1), eps[:, 0], levels[:, None]
        v = self.velocity(self.parameters_of(observations), (1 - sigma) * a + sigma * noise, levels)
        return 0.5 * (v - (noise - a)).square().mean(1)
