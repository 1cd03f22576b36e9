"""The policy of every environment: takes decisions, and replays recorded ones under the current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from unirl.models.base import CanaryOutput
from unirl.models.language.stage import TokenReplay, ValueGradient
from unirl.models.policies.networks import HIDDEN, PARTS, Activation, ObservationValueHead, Outputs, PolicyNetwork
from unirl.models.value_head import TokenValueHead
from unirl.sde.noise import key_seed
from unirl.types.batch import Batch, row
from unirl.types.conditions import Conditions
from unirl.types.device import to_device, to_host
from unirl.types.environments import INSTRUCTION, Observations
from unirl.types.facts import ActionFacts
from unirl.types.segments import ActionSegment


@dataclass(kw_only=True, eq=False)
class ActionCanaryInputs(Batch):
    """The inputs of a policy's canary forward."""

    observations: dict[str, Tensor] = row(heavy=True)  # key -> [B, *shape]
    noise: Tensor = row(heavy=True)  # [B, *noise_shape]


class ActionStage:
    """Decides and replays with one policy network. Rows do not depend on each other."""

    autocast_dtype = torch.float32

    def __init__(self, network: nn.Module, facts: ActionFacts, depth: int, activation: Activation) -> None:
        """
        Args:
            network: a `PolicyNetwork`, possibly sharded.
            depth: layers of the encoder of the value head.
            activation: of the value head.
        """
        self.network = network
        self.facts = facts
        self.depth, self.activation = depth, activation
        self.value_head: nn.Module | None = None

    @property
    def policy(self) -> PolicyNetwork:
        """The network, for what it says without a forward."""
        assert isinstance(self.network, PolicyNetwork)
        return self.network

    def instructions(self, texts: Sequence[str]) -> Observations:
        """The texts of tasks as one more observation, [B, L] tokens. Empty: the policy reads no text."""
        return {}

    def examples(self, count: int, generator: torch.Generator) -> Observations:
        """[count, *shape] random observations: levels of images, numbers in [0, 1), and an instruction."""
        made: Observations = {}
        for key, shape in self.facts.inputs.items():
            if key == INSTRUCTION:
                made |= self.instructions(["reach"] * count)
                continue
            if len(shape) == 3:
                made[key] = torch.randint(256, (count, *shape), generator=generator, dtype=torch.uint8)
            else:
                made[key] = torch.rand(count, *shape, generator=generator)
        return made

    def build_value_head(self, width: int, seed: int) -> nn.Module:
        seed = key_seed(seed, "value_head")
        shapes, normalize = self.facts.inputs, self.facts.is_normalized
        return ObservationValueHead(shapes, width, self.depth, self.activation, seed, normalize)

    def encode(self, observations: Observations) -> Observations:
        """What is recorded of observations [N, *shape], and what the trained network reads, on the CPU."""
        return {key: observations[key] for key in self.facts.inputs}

    def autocast(self) -> AbstractContextManager[Any]:
        """The dtype of a forward."""
        return nullcontext()

    @torch.no_grad()
    def decide(self, observations: Observations, noise: Tensor, deterministic: bool = False) -> Outputs:
        """`actions` [N, ...] as they are recorded, `logp` [N], and what is `executed` [N, chunk, ...]; on the CPU.

        What `encode` makes beside the observations themselves is there as well, by its key. The host waits once for the
        device.

        Args:
            noise: [N, *noise_shape] on the CPU.
            deterministic: take the most likely actions.
        """
        outputs = self._forward(observations, noise=noise, deterministic=deterministic)
        actions, logp = to_host([outputs["actions"], outputs["logp"]])
        return {"actions": actions, "logp": logp, "executed": self.policy.executed(actions)}

    def replay(
        self,
        conditions: Conditions,
        segment: ActionSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """Log-probs [sum L] of all decisions of `segment` in one forward; see `TokenStage.replay`."""
        observations = {key: segment.observations[key] for key in self.facts.inputs}
        outputs = self._forward(observations, actions=segment.actions, entropy=entropy)
        state_values = None
        if values is not None:
            assert self.value_head is not None, "a stack whose loss needs a value head provides it"
            state_values = self._values(self.value_head, observations, outputs, values)[: len(segment.logp)]
        return TokenReplay(outputs["logp"], outputs.get("entropy"), state_values, outputs.get(PARTS))

    def _values(self, head: nn.Module, observations: Observations, outputs: Outputs, gradient: ValueGradient) -> Tensor:
        """[at least sum L] values of the states of decisions. This head has an encoder of its own."""
        return head(self._padded(observations, len(outputs["logp"]), self._device()))

    def canary(self, inputs: ActionCanaryInputs) -> CanaryOutput:
        """Actions and their log-probs on fixed observations."""
        outputs = self._forward(inputs.observations, noise=inputs.noise)
        both = [outputs["actions"].flatten(1) if outputs["actions"].dim() > 1 else outputs["actions"][:, None]]
        return CanaryOutput(values=torch.cat([*both, outputs["logp"][:, None]], dim=1).float())

    def _forward(
        self,
        observations: Observations,
        *,
        actions: Tensor | None = None,
        noise: Tensor | None = None,
        deterministic: bool = False,
        entropy: bool = False,
    ) -> Outputs:
        count, device = next(iter(observations.values())).shape[0], self._device()  # `len` takes ten times as long
        with self.autocast():
            outputs = self.network(
                self._padded(observations, count, device),
                actions=None if actions is None else self._rows(actions, count, device),
                noise=None if noise is None else self._rows(noise, count, device),
                deterministic=deterministic,
                entropy=entropy,
            )
        if count % self.facts.batch_multiple == 0:
            return cast(Outputs, outputs)
        return {name: tensor[:count] for name, tensor in outputs.items()}

    def _device(self) -> torch.device:
        """The device of the weights of the network."""
        return next(self.network.parameters()).device

    def _padded(self, observations: Observations, count: int, device: torch.device) -> Observations:
        return {key: self._rows(value, count, device) for key, value in observations.items()}

    def _rows(self, values: Tensor, count: int, device: torch.device) -> Tensor:
        """The rows on the device of the network, padded so that their bits do not depend on their number."""
        values, missing = to_device(values, device), -count % self.facts.batch_multiple
        return torch.cat([values, values[:1].expand(missing, *values.shape[1:])]) if missing else values


WITH_CACHE = (5, 24)
"""The first version of transformers whose language models take their cache as `cache`."""


class InstructedStage(ActionStage):
    """Decides and replays with a policy that reads instructions. A value is a function of its output `HIDDEN`."""

    def __init__(
        self,
        network: nn.Module,
        facts: ActionFacts,
        prompter: Callable[[Sequence[str]], Tensor],
        width: int,
        autocast_dtype: torch.dtype,
    ) -> None:
        """
        Args:
            prompter: turns the texts of tasks into tokens [B, L].
            width: D of the states `HIDDEN`.
        """
        super().__init__(network, facts, depth=1, activation="silu")
        self.prompter, self.width, self.autocast_dtype = prompter, width, autocast_dtype

    def instructions(self, texts: Sequence[str]) -> Observations:
        return {INSTRUCTION: self.prompter(texts)}

    def build_value_head(self, width: int, seed: int) -> nn.Module:
        return TokenValueHead.of(self.width, width, seed)

    def _values(self, head: nn.Module, observations: Observations, outputs: Outputs, gradient: ValueGradient) -> Tensor:
        hidden = outputs[HIDDEN]
        return head(self._rows(hidden.detach() if gradient == "head" else hidden, len(hidden), self._device()))

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device().type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32)
