"""What vision-language-action models share: a chunk of actions that is denoised beside a language model.

images, instruction, state --language model--> keys and values of its layers
x, sigma                   --expert----------> the velocity, which attends to these
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.config.errors import InvalidValueError
from unirl.models.policies.flow import FlowChain
from unirl.models.policies.scales import EPS, Bounds, Scale, Statistics
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.environments import STATE, ContinuousActions, Observations
from unirl.types.protocols import Kernel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CountedEntries = Literal["executed", "all"]
TrainedPart = Literal["expert", "all"]
Shapes = Mapping[str, tuple[int, ...]]
DECODER_LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""The linear layers of a block of Llama, Gemma or Qwen."""
NUM_ACTIONS, PROMPT_TOKENS = 7, 48
"""The numbers of an action of the usual robot, and the places for an instruction in published models."""
EMPTY = -1
"""Stands in the places of an instruction that no token fills."""


class ChunkChain(FlowChain):
    """A flow policy of chunks of H actions of D numbers, of which the environment gets the first C actions of A.

    Recorded is the whole chain [N, K + 1, H D], since the velocity of each number depends on all of them. The density
    of a chain is the product over all numbers (`logp_of: all`). The numbers that no environment gets change nothing
    but the noise of the importance ratio, so by default the log-prob sums over the C A executed numbers alone, as in
    RLinf (pi-RL, arXiv:2510.25889): the conditional density of each of them given the whole point before it.
    """

    def __init__(
        self,
        *,
        horizon: int,
        width: int,
        state_width: int,
        cameras: Sequence[str],
        actions: int,
        chunk: int,
        num_steps: int,
        kernel: Kernel | None,
        logp_of: CountedEntries,
        state: Scale,
        action: Scale,
    ) -> None:
        """
        Args:
            horizon, width: H and D.
            state_width: the numbers of a state that the network reads. Missing ones are 0.
            cameras: keys of the observations that are images, in the order in which the network reads them.
            actions: A.
            chunk: C.
            num_steps: K.
            logp_of: the numbers of a step whose log-prob counts.
            state, action: the scales of the robot's state and actions.
        """
        super().__init__(
            ContinuousActions(actions), size=horizon * width, num_steps=num_steps, chunk=chunk, kernel=kernel
        )
        self.horizon, self.width, self.state_width = horizon, width, state_width
        self.cameras, self.logp_of, self.scale = tuple(cameras), logp_of, action
        self.register_buffer("state_mean", state.mean, persistent=False)
        self.register_buffer("state_std", state.std, persistent=False)

    def scaled_state(self, observations: Observations) -> Tensor:
        """[N, S] the state in the units of the network."""
        mean, std = self.get_buffer("state_mean"), self.get_buffer("state_std")
        return (observations[STATE].float() - mean) / (std + EPS)

    def padded_state(self, observations: Observations) -> Tensor:
        """[N, state_width] the same with zeros at its end."""
        state = self.scaled_state(observations)
        return pad(state, (0, self.state_width - state.shape[1]))

    @property
    def num_counted(self) -> int:
        return self.chunk * self.action_size if self.logp_of == "executed" else self.size

    def counted(self, x: Tensor) -> Tensor:
        return self._first(x).flatten(1) if self.logp_of == "executed" else x

    def executed(self, actions: Tensor) -> Tensor:
        """[N, C, A] actions of the robot. An environment clips what is beyond its own bounds."""
        return self._first(actions[:, -1]) * (self.scale.std + EPS) + self.scale.mean

    def _first(self, x: Tensor) -> Tensor:
        """[N, C, A] what an environment gets of x [N, H D]."""
        return x.unflatten(1, (self.horizon, self.width))[:, : self.chunk, : self.action_size]


@dataclass(frozen=True)
class Instructor:
    """Turns tasks into tokens, at the start of a fixed number of places."""

    tokenizer: PreTrainedTokenizerBase
    places: int
    text: Callable[[str], str]
    """The text about a task, with its special tokens."""

    def __call__(self, tasks: Sequence[str]) -> Tensor:
        """[B, places] int64: the tokens of the text, then empty places.

        Raises:
            InvalidValueError: 2004, an instruction has more tokens than places.
        """
        rows = torch.full((len(tasks), self.places), EMPTY)
        for row, task in zip(rows, tasks, strict=True):
            tokens = torch.tensor(self.tokenizer(self.text(task), add_special_tokens=False).input_ids)
            if len(tokens) > self.places:
                raise InvalidValueError(
                    f"bundle.prompt_tokens={self.places}: the instruction {task!r} has {len(tokens)} tokens. "
                    f"Set bundle.prompt_tokens={len(tokens)} or more"
                )
            row[: len(tokens)] = tokens
        return rows


def chain_settings(
    settings: Mapping[str, Any], statistics: Statistics, place: str, *, bounds: Bounds | None = None
) -> dict[str, Any]:
    """The arguments of a `ChunkChain` that follow from the settings of its bundle and the statistics of its data.

    Args:
        place: of the statistics, for errors.
        bounds: the statistics that become -1 and 1 (`Scale.of`).
    """
    state, actions = settings["observations"][STATE][0], settings["actions"]
    return {
        "cameras": cameras_of(settings["observations"]),
        "actions": actions,
        "chunk": settings["chunk"],
        "num_steps": settings["num_steps"],
        "kernel": FlowSDEStrategy(eta=settings["eta"]),
        "logp_of": settings["logp_of"],
        "state": Scale.of(statistics, "state", state, f"bundle.observations.{STATE}", place, bounds=bounds),
        "action": Scale.of(statistics, "actions", actions, "bundle.actions", place, bounds=bounds),
    }


def decoder_targets(decoders: Mapping[str, int], layers: Sequence[str] = DECODER_LAYERS) -> tuple[str, ...]:
    """The names of the linear layers of some decoders, for adapters.

    Args:
        decoders: the name of the list of layers of each decoder, and their number.
        layers: the linear layers of each of them.
    """
    return tuple(
        f"{part}.{number}.{layer}" for part, count in decoders.items() for number in range(count) for layer in layers
    )


def cameras_of(shapes: Shapes) -> tuple[str, ...]:
    """The keys of the images."""
    return tuple(key for key in shapes if key != STATE)


def check_sizes(model: str, shapes: Shapes, actions: int, chunk: int, *, state: int, width: int, horizon: int) -> None:
    """Whether a model can read observations of these shapes, and denoise chunks of this size.

    Args:
        state, width, horizon: the most numbers of a state and of an action, and the most actions.

    Raises:
        InvalidValueError: 2004, there is anything else than square images and a state, or it is too large.
    """
    for key, shape in shapes.items():
        if key != STATE and (len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]):
            raise InvalidValueError(
                f"bundle.observations.{key}={list(shape)}: {model} reads square images [3, H, H] and `{STATE}: [S]`. "
                f"Name such cameras, as in {{agentview: [3, 256, 256], {STATE}: [8]}}, and leave out frame_stack"
            )
    if not cameras_of(shapes) or STATE not in shapes:
        raise InvalidValueError(
            f"bundle.observations names {', '.join(shapes)}: {model} reads at least one camera and the state of the "
            f"robot. Name both, as in {{agentview: [3, 256, 256], {STATE}: [8]}}"
        )
    given = shapes[STATE]
    if len(given) != 1 or given[0] > state:
        raise InvalidValueError(
            f"bundle.observations.{STATE}={list(given)}: the model reads a vector of at most {state} numbers. Leave "
            "out those that it was not tuned with"
        )
    for name, value, limit, what in (
        ("actions", actions, width, "numbers of an action"),
        ("chunk", chunk, horizon, "actions"),
    ):
        if value > limit:
            raise InvalidValueError(f"bundle.{name}={value}: the model denoises {limit} {what}. Use {limit} or less")


SCALES = (
    *("norm.weight", "norm1.weight", "norm2.weight", "norm3.weight", "layernorm.weight", "vlln.weight"),
    "scale_factor",
)
"""The ends of the names of tensors that are 1 in a toy."""


def random_state(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights: matrices keep the scale of their inputs, scales are 1 and biases 0."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        if name.endswith(SCALES):
            values = torch.ones(shape)
        elif name.endswith((".bias", ".b")):
            values = torch.zeros(shape)
        else:
            fan_in = shape[1] if name.endswith(".W") else math.prod(shape[1:])
            scale = 0.1 if name.endswith(("token", "pos_embed", "embed_tokens.weight")) else fan_in**-0.5
            values = torch.randn(shape, generator=generator) * scale
        state[name] = values.to(dtype)
    return state
