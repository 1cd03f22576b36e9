"""The check of a language model: the properties that sampling, training and weight sync need of every family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.pipeline import TextPipeline
from unirl.testing.bundle import (
    blocks_of,
    check_facts,
    check_gradient_flags,
    check_gradients,
    expect,
    request_of,
)
from unirl.testing.engine import equal
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

NUM_PROMPTS = 3
TRACK = "text"


def text_params(**changes: object) -> ARSamplingParams:
    """Settings for responses of at most 10 tokens, 4 per prompt."""
    values: dict[str, object] = {"max_new_tokens": 10, "samples_per_prompt": 4, "max_prompt_tokens": 256}
    return ARSamplingParams(**(values | changes))  # type: ignore[arg-type]


def text_request(prompts: int = 2, params: ARSamplingParams | None = None, step: int = 0) -> RolloutReq:
    """A training request for `prompts` prompts of different lengths."""
    params = params or text_params()
    req = request_of([f"How much is {10**i} + {i}?" for i in range(prompts)], TRACK, params, step)
    return req.replace(metadata=[{"answer": str(10**i + i)} for i in range(prompts)]).expand(params.samples_per_prompt)


def check_language_model(pipeline: TextPipeline[LanguageBundle], *, atol: float = 1e-5) -> None:
    """Raises AssertionError, in a sentence, unless the model behind `pipeline` has the properties of every family.

    The facts name existing blocks and layers and the size of the vocabulary. Only the trained module requires
    gradients. The bits of a response do not depend on the number of slots, on order or on other rows. Replay on
    unchanged weights equals sampling within `atol`, and its bits do not depend on the rows packed together. Log-probs
    are those of the tempered distribution before top_k and top_p. Every trained block gets gradients and
    affects the canary.
    """
    check_facts(pipeline)
    check_gradient_flags(pipeline)
    for check in (_vocabulary, _row_bits, _replay, _packing, _truncation, _gradients, _canary):
        check(pipeline, atol)


def _rollout(
    pipeline: TextPipeline[LanguageBundle],
    slots: int = 4,
    order: Callable[[RolloutReq], RolloutReq] = lambda req: req,
    params: ARSamplingParams | None = None,
) -> RolloutTrack[TextSegment]:
    with torch.no_grad():
        req = text_request(NUM_PROMPTS, params or text_params(samples_per_prompt=2))
        return pipeline.generate(order(req), slots).tracks[TRACK].sampled_as(TextSegment)


def _replayed(pipeline: TextPipeline[LanguageBundle], track: RolloutTrack[TextSegment]) -> Tensor:
    with torch.no_grad():
        return pipeline.stage.replay(track.conditions, track.segment).logp


def _vocabulary(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    width = pipeline.stage.canary(pipeline.canary_inputs()).values.shape[-1]
    expect(width == pipeline.facts.vocab_size, f"facts.vocab_size={pipeline.facts.vocab_size}, the logits have {width}")
    highest = int(_rollout(pipeline).segment.tokens.max())
    expect(highest < pipeline.facts.vocab_size, f"the sampled token {highest} is not in the vocabulary")


def _row_bits(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    whole = _rollout(pipeline, 6).segment
    for slots in (1, 2, 3, 8):
        same = equal(_rollout(pipeline, slots).segment, whole)
        expect(same, f"the bits of responses differ between {slots} slots and 6")
    order = [3, 0, 5, 1, 4, 2]
    permuted = _rollout(pipeline, 4, lambda req: req.select(order)).segment
    expect(equal(permuted, whole.select(order)), "the bits of responses depend on the order of rows")
    alone = _rollout(pipeline, 4, lambda req: req.slice(2, 3)).segment
    expect(equal(alone, whole.slice(2, 3)), "the bits of a response depend on other rows")


def _replay(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    track = _rollout(pipeline)
    gap = float((_replayed(pipeline, track) - track.segment.logp).abs().max())
    expect(gap <= atol, f"replay differs from the log-probs of sampling by {gap:.3g} ({atol:g} is allowed)")


def _packing(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    track = _rollout(pipeline)
    together = _replayed(pipeline, track)
    alone = torch.cat([_replayed(pipeline, row) for row in track.chunk(1)])
    expect(torch.equal(together, alone), "replay of packed rows differs from that of each row alone")


def _truncation(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    for change in ({"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.7, "top_k": 3}):
        track = _rollout(pipeline, params=text_params(samples_per_prompt=2, **change))
        gap = float((_replayed(pipeline, track) - track.segment.logp).abs().max())
        settings = ", ".join(f"{name}={value}" for name, value in change.items())
        expect(gap <= atol, f"with {settings}, log-probs are not those of the tempered distribution before truncation")


def _gradients(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    track = _rollout(pipeline)
    check_gradients(pipeline, pipeline.stage.replay(track.conditions, track.segment).logp)


@torch.no_grad()
def _canary(pipeline: TextPipeline[LanguageBundle], atol: float) -> None:
    inputs, module = pipeline.canary_inputs(), pipeline.bundle.trainable()
    before = pipeline.stage.canary(inputs).values
    for block in blocks_of(pipeline):
        weight = max(module.get_submodule(block).parameters(), key=torch.numel)
        original = weight.clone()
        weight.mul_(1.5)
        changed = not torch.equal(pipeline.stage.canary(inputs).values, before)
        weight.copy_(original)
        expect(changed, f"the canary does not change with the weights of block {block}")
