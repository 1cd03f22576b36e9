"""The device's side of batched decoding: the state of all slots, and the step that samples and reads a token of each.

A step reads and writes tensors on the device only. It needs nothing from the host and gives nothing back to it, so the
host launches many steps ahead. Shapes and addresses stay the same while the slots and the width do, so that a step can
be compiled as one graph, or captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from unirl.models.language.attention import DecodeAttention
from unirl.models.language.policy import NextTokenLogits, Outputs, TokenInputs, tempered
from unirl.models.language.sampling import sample_tokens
from unirl.types.device import device_module
from unirl.types.sampling import ARSamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Forward = Callable[[TokenInputs], Outputs]
ROW, COUNT, POSITION, LENGTH = range(4)
"""The lines of `SlotState.counters`."""


@dataclass(eq=False)
class SlotState:
    """The state of all slots, on the device. The values of idle slots are never used."""

    logits: Float[Tensor, "S V"]
    """Logits of the next token."""
    counters: Int[Tensor, "4 S"]
    """The row of the response, its number of tokens, the position of the next token, the number of cached tokens."""

    def assign(self, slots: Int[Tensor, "n"], counters: Int[Tensor, "4 n"], logits: Float[Tensor, "n V"]) -> None:
        """Set the state of `slots`."""
        self.counters.index_copy_(1, slots, counters)
        self.logits.index_copy_(0, slots, logits)

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Keep only `slots`, in this order."""
        self.logits, self.counters = self.logits[slots], self.counters[:, slots]


class Sampler(Protocol):
    """Samples the next token of every slot."""

    def __call__(
        self, state: SlotState, forbid_ends: bool = False, forced: Int[Tensor, "S"] | None = None
    ) -> tuple[Int[Tensor, "S"], Float[Tensor, "S"]]:
        """Tokens [S] with their log-probs [S] before truncation.

        Args:
            forbid_ends: whether any response may be shorter than `min_new_tokens`.
            forced: tokens to take in place of sampled ones; -1 = none.
        """


@dataclass(frozen=True, eq=False)
class TokenSampler:
    """Samples the next token of every slot from the logits of the slot."""

    params: ARSamplingParams
    uniforms: Float[Tensor, "B T"]
    """The uniform number that selects each token of each row."""
    ends: Int[Tensor, "E"]
    """The tokens that end a response."""

    def __call__(
        self, state: SlotState, forbid_ends: bool = False, forced: Int[Tensor, "S"] | None = None
    ) -> tuple[Int[Tensor, "S"], Float[Tensor, "S"]]:
        """See `Sampler`."""
        counts = state.counters[COUNT]
        logps = tempered(state.logits, self.params.temperature)
        allowed = logps
        if forbid_ends:
            too_short = counts < self.params.min_new_tokens
            allowed = logps.clone()
            allowed[:, self.ends] = allowed[:, self.ends].masked_fill(too_short[:, None], -math.inf)
        # An idle slot, or one whose end the host has not seen, counts on.
        uniform = self.uniforms[state.counters[ROW], counts.clamp(max=self.uniforms.shape[1] - 1)]
        tokens = sample_tokens(allowed, uniform, self.params)
        if forced is not None:
            tokens = torch.where(forced < 0, tokens, forced)
        return tokens, logps.gather(1, tokens[:, None])[:, 0]


def read_tokens(
    forward: Forward,
    state: SlotState,
    tokens: Int[Tensor, "S"],
    capacity: int,
    groups: Mapping[int, Sequence[int] | None],
    position_shape: Sequence[int] = (),
) -> None:
    """Read one token of every slot: writes the logits of the next ones and advances the counters.

    Args:
        capacity: the capacity of the cache per slot.
        groups: see `DecodeAttention`.
        position_shape: [3] for models whose positions have three components, which are equal in a response.
    """
    _, _, positions, lengths = state.counters
    if position_shape:
        positions = positions[:, None].expand(-1, *position_shape)
    attention_fn = DecodeAttention(capacity, lengths, groups)
    output_fn = NextTokenLogits(torch.arange(len(tokens), device=tokens.device))
    state.logits.copy_(forward(TokenInputs(tokens, positions, attention_fn, output_fn))["logits"])
    state.counters[COUNT:].add_(1)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """Samples a token of every slot and reads it. For equal arguments, it is the same graph on the same memory."""

    forward: Forward
    sampler: Sampler
    state: SlotState
    capacity: int
    """The capacity of the cache per slot."""
    position_shape: Sequence[int] = ()

    def __call__(self, width: int, forbid_ends: bool) -> tuple[Int[Tensor, "S"], Float[Tensor, "S"]]:
        """Tokens [S] and their log-probs [S]. All slots read `width` places of the cache."""
        tokens, logps = self.sampler(self.state, forbid_ends)
        read_tokens(self.forward, self.state, tokens, self.capacity, {width: None}, self.position_shape)
        return tokens, logps


class CapturedStep:
    """A `DecodeStep` as CUDA graphs, each of which the host launches at once in place of thousands of operations.

    The first call with some arguments runs the step itself, since kernels that have not run cannot be captured. The
    graphs share memory for what they allocate, so their results are copied before another one runs.
    """

    def __init__(self, step: DecodeStep, device: torch.device) -> None:
        module = device_module(device)
        assert module is not None, "a CPU has no graphs"
        self.step = step
        self.module = module
        self.pool = module.graph_pool_handle()
        self.warm: set[tuple[int, bool]] = set()
        self.graphs: dict[tuple[int, bool], tuple[ReplayedGraph, Tensor, Tensor]] = {}

    def __call__(self, width: int, forbid_ends: bool) -> tuple[Int[Tensor, "S"], Float[Tensor, "S"]]:
        """See `DecodeStep`."""
        key = width, forbid_ends
        if key not in self.warm:
            self.warm.add(key)
            return self.step(width, forbid_ends)
        if key not in self.graphs:
            graph = self.module.CUDAGraph()
            with self.module.graph(graph, pool=self.pool):
                tokens, logps = self.step(width, forbid_ends)
            self.graphs[key] = graph, tokens, logps
        graph, tokens, logps = self.graphs[key]
        graph.replay()
        return tokens.clone(), logps.clone()


class ReplayedGraph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch all of its operations."""
