"""A policy whose actions of a chunk are decoded together by attention. The decoder of ACT, Zhao et al. 2023.

    observations --one token for each key--> memory
    C learned queries --layers of attention to each other and to the memory--> the means of C actions

arXiv:2304.13705, without its style variable: the chunk is one Gaussian, so a policy gradient can train it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unirl.models.policies.networks import (
    Activation,
    ObservationEncoder,
    PolicyNetwork,
    Shapes,
    initialise,
    normal_log_prob,
)
from unirl.types.environments import ContinuousActions, Observations


class ChunkDecoderPolicy(PolicyNetwork):
    """Chunks of C actions of A numbers: N(mean(o), std^2) with one std for each. The environment clips to [-1, 1]."""

    noise = "normal"

    def __init__(
        self,
        shapes: Shapes,
        actions: ContinuousActions,
        chunk: int,
        width: int,
        depth: int,
        heads: int,
        activation: Activation,
        seed: int,
        log_std: float,
    ) -> None:
        """
        Args:
            chunk: C.
            depth, heads: layers of the decoder, and heads of their attention, which divide the width.
            log_std: initial log of the std.
        """
        super().__init__()
        self.actions, self.chunk, self.action_size = actions, chunk, actions.size
        self.noise_shape = (chunk * actions.size,)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoders = nn.ModuleDict({
                key: ObservationEncoder({key: shape}, width, 1, activation) for key, shape in shapes.items()
            })  # fmt: skip
            self.queries = nn.Parameter(torch.randn(chunk, width))
            self.layers = nn.ModuleList(
                nn.TransformerDecoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(depth)
            )
            self.output_layer = nn.Linear(width, actions.size)
            initialise(self.encoders, math.sqrt(2))
            initialise(self.output_layer, 0.01)
        self.log_std = nn.Parameter(torch.full(self.noise_shape, log_std))

    def parameters_of(self, observations: Observations) -> Tensor:
        """[N, 2, C A] means and logs of the std."""
        memory = torch.stack([encoder({key: observations[key]}) for key, encoder in self.encoders.items()], dim=1)
        x = self.queries.expand(len(memory), -1, -1)
        for layer in self.layers:
            x = layer(x, memory)
        mean = self.output_layer(x).flatten(1)
        return torch.stack([mean, self.log_std.expand_as(mean)], dim=1)

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.unbind(1)
        return mean + log_std.exp() * noise

    def likeliest(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return parameters[:, 0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        return normal_log_prob(actions, *parameters.unbind(1)).sum(1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return (parameters[:, 1] + 0.5 * math.log(2 * math.pi * math.e)).sum(1)

    def executed(self, actions: Tensor) -> Tensor:
        return actions.unflatten(1, (self.chunk, self.action_size))

    def recorded(self, executed: Tensor) -> Tensor:
        return executed.flatten(1)
