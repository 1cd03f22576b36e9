"""The policy of every language model, written once: sample a response, replay it under the current weights.

A family adds a network (a `TokenPolicy`): one forward over packed tokens.

    sample:  prompts --prefill--> slots --draw, one forward a token--> responses      finished rows make room for others
    replay:  prompts and responses, end to end, one forward --> log-prob, entropy, value of each token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from unirl.models.base import CanaryOutput
from unirl.models.chunks import padded_rows
from unirl.models.language.attention import PackedAttention
from unirl.models.language.chat import TextCodec
from unirl.models.language.decoding import Decoding
from unirl.models.language.packing import pack_prompts, pack_responses
from unirl.models.language.policy import NextTokenLogits, NextTokenLogProbs, Outputs, TokenInputs
from unirl.models.language.responses import Response, ResponseBuilder
from unirl.models.language.tools import ToolBox
from unirl.models.value_head import TokenValueHead
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.facts import LanguageFacts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

ValueGradient = Literal["head", "policy"]
"""How far back values are differentiated: within the value head, or on through the policy that its input is from."""


@dataclass(frozen=True)
class TokenReplay:
    """Recorded tokens under the current weights, packed as their segment is; fp32."""

    logp: Tensor  # [sum L] nats, of log_softmax(logits / temperature): tempered, and never truncated
    entropy: Tensor | None = None  # [sum L] nats, of the same distribution over the vocabulary; only if asked for
    values: Tensor | None = None  # [sum L] fp32, V of the state before each token; only if asked for


class TokenStage(Protocol):
    """A policy over tokens. A row's values do not depend on its neighbours."""

    value_head: nn.Module | None
    """What a loss with a critic asks, [N] from hidden states [N, D]; a train backend's."""

    def build_value_head(self, width: int, seed: int) -> nn.Module:
        """A fresh `TokenValueHead` for the hidden states of this policy."""
        ...

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """Log-probs of all tokens of `segment`, context ones too, in one forward; with gradients if enabled.

        The temperature is the segment's own. top_p and top_k shaped the sample, and no log-prob: an engine that
        renormalises what it kept reports another policy's log-probs.

        Args:
            values: what the value head says of the hidden states that the logits are made of, and how far back the
                gradient of that goes; absent = the head is not asked.
        """
        ...


class ARStage:
    """Samples and replays with one network. Rows are independent of their neighbours."""

    def __init__(
        self,
        network: nn.Module,
        facts: LanguageFacts,
        codec: TextCodec,
        autocast_dtype: torch.dtype = torch.float32,
        tools: ToolBox | None = None,
    ) -> None:
        """
        Args:
            network: a `TokenPolicy`, adapted and sharded as it may be.
            tools: what answers in the middle of a response; absent = nothing does.
        """
        self.network = network
        self.facts = facts
        self.codec = codec
        self.autocast_dtype = autocast_dtype
        self.tools = tools
        self.value_head: nn.Module | None = None

    def build_value_head(self, width: int, seed: int) -> TokenValueHead:
        """A fresh value head for the hidden states of this model."""
        return TokenValueHead.of(self.facts.hidden_size, width, seed)

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, params: ARSamplingParams, noise: NoiseSource, ids: Sequence[str], slots: int
    ) -> TextSegment:
        """One response per row of `conditions`, `slots` of them in the making at a time.

        Token t of a row is the inverse CDF, in the order of the vocabulary, of the distribution that top_k and top_p
        leave, at entry t of the draw `tok` of the row's id. At temperature 0, log-probs are those of temperature 1.
        """
        responses = [Response(row, id) for row, id in enumerate(ids)]
        endings = ResponseBuilder(self.codec, params, self.tools)
        uniforms = noise.uniform(ids, "tok", (params.max_new_tokens,)).to(self._device())
        decoding = Decoding(self._forward, self._here(conditions), params, endings, uniforms, responses)
        decoding.run(slots, self.facts.batch_multiple)
        return segment_of(responses, params).to(self._device())

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """The contract of `TokenStage`."""
        packed, before = pack_responses(self._here(conditions), segment)
        multiple = self.facts.batch_multiple
        padded, rows = packed.padded(multiple), padded_rows(len(before), multiple)
        output_fn = NextTokenLogProbs(
            at=before[rows],
            targets=segment.tokens.to(before.device)[rows],
            temperature=segment.temperature,
            vocab_size=self.facts.vocab_size,
            entropy=entropy,
            hidden=values is not None,
            multiple=multiple,
        )
        found = self._forward(padded.inputs(PackedAttention(padded.lengths, self._device()), output_fn))
        kept = {name: tensor[: len(before)] for name, tensor in found.items()}
        said = None if values is None else self._values(kept["hidden"], values)
        return TokenReplay(kept["logp"], kept.get("entropy"), said)

    @torch.no_grad()
    def canary(self, inputs: PromptTokens) -> CanaryOutput:
        """The logits [B, V] of what follows each of the prompts `inputs`."""
        packed = pack_prompts(self._here({"prompt": inputs}), range(len(inputs)))
        lasts = padded_rows(len(inputs), self.facts.batch_multiple)
        padded, at = packed.padded(self.facts.batch_multiple), (inputs.offsets[1:] - 1)[lasts]
        with torch.compiler.set_stance("force_eager"):
            attention_fn = PackedAttention(padded.lengths, self._device())
            output_fn = NextTokenLogits(at.to(self._device()))
            found = self._forward(padded.inputs(attention_fn, output_fn))
        return CanaryOutput(values=found["logits"][: len(inputs)])

    def _values(self, hidden: Tensor, gradient: ValueGradient) -> Tensor:
        """[sum L] what the value head says of the hidden states."""
        assert self.value_head is not None, "a stack whose loss needs a value head provides it"
        said: Tensor = self.value_head(hidden if gradient == "policy" else hidden.detach())
        return said

    def _forward(self, inputs: TokenInputs) -> Outputs:
        device = inputs.tokens.device.type
        with torch.autocast(device, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            found: Outputs = self.network(inputs)
        return found

    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _here(self, conditions: Conditions) -> Conditions:
        return {name: condition.to(self._device()) for name, condition in conditions.items()}


def segment_of(responses: Sequence[Response], params: ARSamplingParams) -> TextSegment:
    """What was sampled, packed, on the CPU."""
    lengths = torch.tensor([0, *(len(response.tokens) for response in responses)])
    return TextSegment(
        tokens=torch.tensor([token for response in responses for token in response.tokens]),
        logp=torch.tensor([logp for response in responses for logp in response.logps]),
        loss_mask=torch.tensor([flag for response in responses for flag in response.sampled]),
        offsets=lengths.cumsum(0),
        finished=torch.tensor([response.finished for response in responses]),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        anchors={},
    )
