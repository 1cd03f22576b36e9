"""Small language models under test, requests for them, and what transformers itself computes from the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.language.bundle import language_facts
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.pipeline import TextPipeline
from unirl.models.language.policy import policy_class
from unirl.models.language.stage import ARStage
from unirl.models.language.tools import ToolBox
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer
from unirl.models.qwen3.family import QWEN3, Qwen3Bundle
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

TEXTS = ("what is 1+1?", "name a colour", "x" * 70)
NOISE = NoiseSource(7, "r", 0)
ENDS = (258, *range(16))
"""Many tokens end a response, so that responses are ragged."""


def networks(seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """A policy and transformers' own network with the same random weights."""
    import transformers

    config = Qwen3Bundle.toys["toy"] | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    policy = policy_class(transformers.Qwen3ForCausalLM)(transformers.Qwen3Config(**config)).eval()
    policy.load_state_dict(plain.state_dict())
    return policy, plain


def stage_of(network: nn.Module, tools: ToolBox | None = None, **changes: Any) -> ARStage:
    """A stage over a small network on the CPU."""
    facts = language_facts(QWEN3, Qwen3Bundle.toys["toy"] | changes)
    return ARStage(network, facts, TextCodec(qwen3_tokenizer(), ENDS), tools=tools)


def prompts_of_lengths(lengths: Sequence[int], seed: int = 0) -> Conditions:
    """Prompts of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {"prompt": prompt_tokens([torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths])}


def segment_of_lengths(lengths: Sequence[int], temperature: float = 1.0, seed: int = 1) -> TextSegment:
    """Responses of random bytes, as if they had been sampled."""
    total = sum(lengths)
    return TextSegment(
        tokens=torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed)),
        logp=torch.zeros(total),
        loss_mask=torch.ones(total, dtype=torch.bool),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        finished=torch.ones(len(lengths), dtype=torch.bool),
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        anchors={},
    )


def rows_of(conditions: Conditions, segment: TextSegment) -> list[tuple[Tensor, Tensor]]:
    """(prompt, response) of each row."""
    prompts = conditions["prompt"]
    assert isinstance(prompts, PromptTokens)
    pieces = prompts.tokens.split(prompts.lengths.tolist()), segment.tokens.split(segment.lengths.tolist())
    return list(zip(*pieces, strict=True))


def textbook_logits(plain: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """[L, V] before each token of a response: one row, no cache, transformers' own forward."""
    return plain(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]


def textbook_logp(plain: Any, conditions: Conditions, segment: TextSegment) -> Tensor:
    """[sum L] the log-probs of recorded tokens, one row at a time."""
    result = []
    for prompt, response in rows_of(conditions, segment):
        logps = (textbook_logits(plain, prompt, response) / segment.temperature).log_softmax(1)
        result.append(logps.gather(1, response[:, None])[:, 0])
    return torch.cat(result)


def request(params: ARSamplingParams, texts: Sequence[str] = TEXTS, siblings: int = 2) -> RolloutReq:
    """`siblings` responses to each text."""
    groups = [f"p{i}@0" for i in range(len(texts))]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=list(texts))},
        metadata=[{} for _ in texts],
        tracks={"text": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    ).expand(siblings)


def rollout(pipeline: TextPipeline, params: ARSamplingParams, slots: int = 4, **asked: Any) -> RolloutTrack:
    """The text track of a small request."""
    return pipeline.generate(request(params, **asked), slots).tracks["text"]


def sampled(stage: ARStage, conditions: Conditions, params: ARSamplingParams, slots: int = 4) -> TextSegment:
    """One response per row of `conditions`."""
    ids = [f"row{i}" for i in range(len(conditions["prompt"]))]
    return stage.sample(conditions, params, NOISE, ids, slots)
