"""The policy of every language model: samples responses, and replays them under the current weights.

A family adds only a network (a `TokenPolicy`), which runs one forward over packed tokens.

    sample:  prompts --prefill--> cache --one forward per token--> responses       (no gradients)
    replay:  prompts and responses, end to end --one forward--> log-prob, entropy, value of each token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unirl.models.base import CanaryOutput
from unirl.models.chunks import padded_rows
from unirl.models.language.chat import TextCodec
from unirl.models.language.decoding import Decoding, Response, ResponseBuilder
from unirl.models.language.packing import PackedTokens, pack_prompts, pack_responses, prompts_of, with_beginnings
from unirl.models.language.policy import NextTokenLogits, NextTokenLogProbs, Outputs, TokenInputs
from unirl.models.language.tools import ToolBox
from unirl.models.value_head import TokenValueHead
from unirl.sde.noise import NoiseSource
from unirl.types.batch import bounds_of, take_rows
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.device import to_device
from unirl.types.facts import LanguageFacts
from unirl.types.primitives import StartedResponses
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import PackedSegment, TextSegment

if TYPE_CHECKING:
    from jaxtyping import Float

ValueGradient = Literal["head", "policy"]
"""How far values are differentiated: only the value head, or also the policy that computes the head's input."""


@dataclass(frozen=True)
class TokenReplay:
    """Recorded tokens under the current weights, fp32, packed in the order of their segment."""

    logp: Tensor  # [sum L] nats, log_softmax(logits / temperature) before top-k and top-p
    entropy: Tensor | None = None  # [sum L] nats, of the same distribution over the vocabulary; only if requested
    values: Tensor | None = None  # [sum L] fp32, V of the state before each token; only if requested
    parts: Tensor | None = None  # [sum L, U] nats, of the parts of each decision, whose sum is logp; None without parts


PackedT_contra = TypeVar("PackedT_contra", bound=PackedSegment, contravariant=True)


class TokenStage(Protocol[PackedT_contra]):
    """A policy over packed elements: tokens, or decisions in environments. Rows do not depend on each other."""

    value_head: nn.Module | None
    """Critic head, [N] from hidden states [N, D], created by the train backend. None unless `Needs.value` is set."""

    def build_value_head(self, width: int, seed: int) -> nn.Module:
        """A new `TokenValueHead` for the hidden states of this policy."""

    def replay(
        self,
        conditions: Conditions,
        segment: PackedT_contra,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """Log-probs [sum L] of all tokens of `segment`, tool answers included, in one forward.

        Gradients flow if they are enabled. The temperature is the segment's own. top_p and top_k shaped the sample
        but no log-prob: an engine that renormalises after truncation reports the log-probs of another policy.

        Args:
            values: compute values from the hidden states that the logits are made of, and differentiate them this
                far. None computes no values.
        """


AnyTokenStage = TokenStage[Any]
"""A policy over packed elements of a kind that only the policy knows."""


class ARStage:
    """Samples and replays with one autoregressive network. Rows do not depend on each other."""

    def __init__(
        self,
        network: nn.Module,
        facts: LanguageFacts,
        codec: TextCodec,
        autocast_dtype: torch.dtype = torch.float32,
        tools: ToolBox | None = None,
        use_cuda_graphs: bool = False,
    ) -> None:
        """
        Args:
            network: a `TokenPolicy`, possibly with adapters, possibly sharded.
            tools: tools that the policy may call within a response. None allows no calls.
            use_cuda_graphs: see `TextPipeline`.
        """
        self.network = network
        self.facts = facts
        self.codec = codec
        self.autocast_dtype = autocast_dtype
        self.tools = tools
        self.use_cuda_graphs = use_cuda_graphs
        self.value_head: nn.Module | None = None

    def build_value_head(self, width: int, seed: int) -> TokenValueHead:
        return TokenValueHead.of(self.facts.hidden_size, width, seed)

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, params: ARSamplingParams, noise: NoiseSource, ids: Sequence[str], slots: int
    ) -> TextSegment:
        """One response per row of `conditions`, at most `slots` of them at a time.

            p_t = softmax(logits_t / temperature), reduced by top_k and then top_p
            token_t = inverse CDF of p_t, in vocabulary order, at u_t

        u [B, max_new_tokens] are uniform numbers, keyed by each row's id and the name `tok`. Temperature 0 takes the
        most likely token; its log-prob is then that of temperature 1. Returns packed tokens and log-probs [sum L].
        """
        responses = [Response(row, id) for row, id in enumerate(ids)]
        self._complete(responses, conditions, params, self._uniforms(params, noise, ids), slots)
        return text_segment(responses, params).to(self._device())

    @torch.no_grad()
    def go_on(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        noise: NoiseSource,
        ids: Sequence[str],
        slots: int,
        started: StartedResponses,
        version: int,
    ) -> TextSegment:
        """As `sample`, for responses that have the tokens of `started` already, and that pause after some more.

        They go on with the same uniform numbers as if they had not paused, so on unchanged weights of a CPU the slices
        of a response have its bits.

        Args:
            version: optimizer updates behind the present weights, from which the next tokens come.
        """
        responses = continued_responses(ids, started)
        uniforms = self._uniforms(params, noise, ids)
        self._complete(responses, with_beginnings(conditions, started), params, uniforms, slots)
        segment = text_segment(responses, params)
        before = started.versions.cpu().split(started.offsets.diff().tolist())
        versions = [
            torch.cat([earlier, torch.full((len(each.tokens) - each.num_before,), version)])
            for each, earlier in zip(responses, before, strict=True)
        ]
        return segment.replace(versions=torch.cat(versions)).to(self._device())

    def _uniforms(self, params: ARSamplingParams, noise: NoiseSource, ids: Sequence[str]) -> Tensor:
        """[B, max_new_tokens] the uniform numbers that select the tokens of each row."""
        return to_device(noise.uniform(ids, "tok", (params.max_new_tokens,)), self._device())

    def _complete(
        self,
        responses: Sequence[Response],
        conditions: Conditions,
        params: ARSamplingParams,
        uniforms: Tensor,
        slots: int,
        guidance_scale: float = 1.0,
    ) -> None:
        """Sample all tokens of `responses`. See `Decoding`."""
        builder = ResponseBuilder(self.codec, params, self.tools)
        # Autocast keeps its copies of trained float32 weights until the outermost context ends, so each weight is cast
        # once in a rollout. The outer context is switched off: only forwards compute in the lower precision.
        with torch.autocast(self._device().type, enabled=False):
            Decoding(
                self._forward,
                self._to_device(conditions),
                builder,
                uniforms,
                responses,
                slots,
                self.facts.batch_multiple,
                self.use_cuda_graphs,
                guidance_scale,
            ).run()

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        """See `TokenStage.replay`. On unchanged weights the log-probs equal those of `sample`, on a CPU bit for bit.

        Prompts and responses are packed to [N] tokens; `previous` [sum L] points to the token before each response
        token, whose hidden state gives that token's logits.
        """
        packed, previous = self._pack(self._to_device(conditions), segment)
        multiple = self.facts.batch_multiple
        padded, rows = packed.padded(multiple), padded_rows(len(previous), multiple)
        output_fn = self._log_probs(segment)(
            index=take_rows(previous, rows),
            targets=take_rows(to_device(segment.tokens, previous.device), rows),
            temperature=segment.temperature,
            vocab_size=self.facts.vocab_size,
            entropy=entropy,
            hidden=values is not None,
            multiple=multiple,
        )
        outputs = self._forward(padded.inputs(padded.attention(self._device()), output_fn))
        outputs = {name: tensor[: len(previous)] for name, tensor in outputs.items()}
        token_values = None
        if values is not None:
            assert self.value_head is not None, "a stack whose loss needs a value head provides it"
            token_values = self.value_head(outputs["hidden"] if values == "policy" else outputs["hidden"].detach())
        return TokenReplay(outputs["logp"], outputs.get("entropy"), token_values)

    def _pack(self, conditions: Conditions, segment: TextSegment) -> tuple[PackedTokens, Tensor]:
        """The rows of a replay, and for each token of `segment` the index [sum L, ...] of what gives its logits."""
        return pack_responses(conditions, segment)

    def _log_probs(self, segment: TextSegment) -> Callable[..., NextTokenLogProbs]:
        """Builds the function that computes the outputs of a replay."""
        return NextTokenLogProbs

    def canary(self, inputs: PromptTokens) -> CanaryOutput:
        """The logits [B, V] of the token after each of the prompts `inputs`."""
        return CanaryOutput(values=self.next_logits({"prompt": inputs}))

    @torch.no_grad()
    def next_logits(self, conditions: Conditions) -> Float[Tensor, "B V"]:
        """The logits of the token after each of B prompts, for V tokens, without compilation."""
        prompts = prompts_of(conditions)
        packed = pack_prompts(self._to_device(conditions), range(len(prompts)))
        padded = packed.padded(self.facts.batch_multiple)
        last_tokens = (prompts.offsets[1:] - 1)[padded_rows(len(prompts), self.facts.batch_multiple)]
        with torch.compiler.set_stance("force_eager"):
            output_fn = NextTokenLogits(last_tokens.to(self._device()))
            outputs = self._forward(padded.inputs(padded.attention(self._device()), output_fn))
        return outputs["logits"][: len(prompts)]

    def _forward(self, inputs: TokenInputs) -> Outputs:
        device = inputs.tokens.device.type
        with torch.autocast(device, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            return self.network(inputs)

    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _to_device(self, conditions: Conditions) -> Conditions:
        return {name: condition.to(self._device()) for name, condition in conditions.items()}


def continued_responses(ids: Sequence[str], started: StartedResponses) -> list[Response]:
    """Responses that have the tokens of `started`, and pause after `pause_after` more."""
    lengths = started.offsets.diff().tolist()
    tokens, logps = started.tokens.cpu().split(lengths), started.logp.cpu().split(lengths)
    return [
        Response(
            row,
            id,
            tokens=tokens[row].tolist(),
            logps=logps[row].tolist(),
            sampled=[True] * length,
            num_sampled=length,
            pause_at=length + started.pause_after,
            num_before=length,
        )
        for row, (id, length) in enumerate(zip(ids, lengths, strict=True))
    ]


def text_segment(responses: Sequence[Response], params: ARSamplingParams) -> TextSegment:
    """The sampled responses as a packed segment on the CPU."""
    return TextSegment(
        tokens=torch.tensor([token for response in responses for token in response.tokens]),
        logp=torch.tensor([logp for response in responses for logp in response.logps]),
        loss_mask=torch.tensor([flag for response in responses for flag in response.sampled]),
        offsets=bounds_of([len(response.tokens) for response in responses]),
        finished=torch.tensor([response.finished for response in responses]),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        anchors={},
    )
