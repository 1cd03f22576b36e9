"""The check of a language model: the properties that sampling, training and weight sync need of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unirl.models.language.pipeline import TextPipeline
from unirl.testing.bundle import check_facts, check_gradient_flags, expect
from unirl.testing.engine import equal
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
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
    groups = [f"p{i}@0" for i in range(prompts)]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=[f"How much is {10**i} + {i}?" for i in range(prompts)])},
        metadata=[{"answer": str(10**i + i)} for i in range(prompts)],
        tracks={TRACK: TrackSpec(sampling=params)},
        purpose="r",
        step=step,
        weights="live",
        weight_version=0,
    ).expand(params.samples_per_prompt)


def check_language_model(pipeline: TextPipeline[Any], *, atol: float = 1e-5) -> None:
    """Raises AssertionError, in a sentence, unless the model behind `pipeline` has the properties of every family.

    The facts name existing blocks and layers and the size of the vocabulary. Only the trained module requires
    gradients. The bits of a response do not depend on the number of slots, on order or on other rows. Replay on
    unchanged weights equals sampling within `atol`, and its bits do not depend on the rows packed together. Log-probs
    are those of the tempered distribution before top_k and top_p. Every trained block gets gradients and
    affects the canary.
    """
    rollout = _Rollouts(pipeline)
    check_facts(pipeline)
    check_gradient_flags(pipeline)
    for check in (_vocabulary, _row_bits, _replay, _packing, _truncation, _gradients, _canary):
        check(pipeline, rollout, atol)


class _Rollouts:
    """Small rollouts of one pipeline."""

    def __init__(self, pipeline: TextPipeline[Any]) -> None:
        self.pipeline = pipeline

    def __call__(
        self,
        slots: int = 4,
        order: Callable[[RolloutReq], RolloutReq] = lambda req: req,
        params: ARSamplingParams | None = None,
    ) -> RolloutTrack[TextSegment]:
        with torch.no_grad():
            req = text_request(NUM_PROMPTS, params or text_params(samples_per_prompt=2))
            return self.pipeline.generate(order(req), slots).tracks[TRACK]


def _replayed(pipeline: TextPipeline[Any], track: RolloutTrack[TextSegment]) -> Tensor:
    with torch.no_grad():
        return pipeline.stage.replay(track.conditions, track.segment).logp


def _vocabulary(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    width = pipeline.stage.canary(pipeline.canary_inputs()).values.shape[-1]
    expect(width == pipeline.facts.vocab_size, f"facts.vocab_size={pipeline.facts.vocab_size}, the logits have {width}")
    highest = int(rollout().segment.tokens.max())
    expect(highest < pipeline.facts.vocab_size, f"the sampled token {highest} is not in the vocabulary")


def _row_bits(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    whole = rollout(6).segment
    for slots in (1, 2, 3, 8):
        expect(equal(rollout(slots).segment, whole), f"the bits of responses differ between {slots} slots and 6")
    order = [3, 0, 5, 1, 4, 2]
    permuted = rollout(4, lambda req: req.select(order)).segment
    expect(equal(permuted, whole.select(order)), "the bits of responses depend on the order of rows")
    alone = rollout(4, lambda req: req.slice(2, 3)).segment
    expect(equal(alone, whole.slice(2, 3)), "the bits of a response depend on other rows")


def _replay(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    track = rollout()
    gap = float((_replayed(pipeline, track) - track.segment.logp).abs().max())
    expect(gap <= atol, f"replay differs from the log-probs of sampling by {gap:.3g} ({atol:g} is allowed)")


def _packing(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    track = rollout()
    together = _replayed(pipeline, track)
    alone = torch.cat([_replayed(pipeline, row) for row in track.chunk(1)])
    expect(torch.equal(together, alone), "replay of packed rows differs from that of each row alone")


def _truncation(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    for change in ({"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.7, "top_k": 3}):
        track = rollout(params=text_params(samples_per_prompt=2, **change))
        gap = float((_replayed(pipeline, track) - track.segment.logp).abs().max())
        settings = ", ".join(f"{name}={value}" for name, value in change.items())
        expect(gap <= atol, f"with {settings}, log-probs are not those of the tempered distribution before truncation")


def _gradients(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    track, module = rollout(), pipeline.bundle.trainable()
    logp = pipeline.stage.replay(track.conditions, track.segment).logp
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(logp.sum(), list(parameters.values()), allow_unused=True)
    moved = {name for name, g in zip(parameters, gradients, strict=True) if g is not None and bool(g.abs().sum() > 0)}
    for block in _blocks(pipeline):
        expect(any(name.startswith(block + ".") for name in moved), f"no gradient reaches block {block}")


@torch.no_grad()
def _canary(pipeline: TextPipeline[Any], rollout: _Rollouts, atol: float) -> None:
    inputs, module = pipeline.canary_inputs(), pipeline.bundle.trainable()
    before = pipeline.stage.canary(inputs).values
    for block in _blocks(pipeline):
        weight = max(module.get_submodule(block).parameters(), key=torch.numel)
        original = weight.clone()
        weight.mul_(1.5)
        changed = not torch.equal(pipeline.stage.canary(inputs).values, before)
        weight.copy_(original)
        expect(changed, f"the canary does not change with the weights of block {block}")


def _blocks(pipeline: TextPipeline[Any]) -> list[str]:
    names = pipeline.facts.block_class_names
    return [name for name, child in pipeline.bundle.trainable().named_modules() if type(child).__name__ in names]
