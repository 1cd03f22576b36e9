"""The policy of models that write an image as a fixed number of tokens, with classifier-free guidance on their logits.

    prompt         [bos text begin-of-image] --+
                                               +--guided logits--> token 1 --> token 2 --> ... --decoder--> image
    unconditional  [bos pad  begin-of-image] --+

Sampling and replay compute the same guided log-probs. At guidance scale 1 there is no unconditional branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from unirl.models.language.decoding import Response
from unirl.models.language.guidance import GuidedLogProbs
from unirl.models.language.packing import PackedTokens, pack_responses, prompts_of
from unirl.models.language.policy import NextTokenLogProbs
from unirl.models.language.stage import ARStage, text_segment
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.sampling import ARSamplingParams, ImageTokenSamplingParams
from unirl.types.segments import ImageTokenSegment, TextSegment

UNCONDITIONAL = "unconditional_prompt"
"""The condition with the prompt of the unconditional branch. There is one if, and only if, guidance is on."""


class ImageTokenStage(ARStage):
    """Samples and replays the tokens of images. All rows have the same number of them."""

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, params: ARSamplingParams, noise: NoiseSource, ids: Sequence[str], slots: int
    ) -> ImageTokenSegment:
        """One image per row of `conditions`, at most `slots` of them at a time. See `ARStage.sample`."""
        assert isinstance(params, ImageTokenSamplingParams)
        images = [Response(row, id) for row, id in enumerate(ids)]
        uniforms = self._uniforms(params, noise, ids)
        if params.is_guided:
            branches = [Response(len(ids) + row, id) for row, id in enumerate(ids)]
            prompts = PromptTokens.concat([prompts_of(conditions), unconditional_of(conditions)])
            responses = [branch for pair in zip(images, branches, strict=True) for branch in pair]
            self._complete(responses, {"prompt": prompts}, params, uniforms, slots, params.guidance_scale)
        else:
            self._complete(images, conditions, params, uniforms, slots)
        return image_token_segment(images, params).to(self._device())

    def _pack(self, conditions: Conditions, segment: TextSegment) -> tuple[PackedTokens, Tensor]:
        """With guidance, the rows of both branches, and index pairs [sum L, 2]."""
        packed, previous = pack_responses(conditions, segment)
        if guided(segment) is None:
            return packed, previous
        others, others_previous = pack_responses({"prompt": unconditional_of(conditions)}, segment)
        pairs = torch.stack([previous, others_previous + len(packed.tokens)], dim=1)
        return packed.followed_by(others), pairs

    def _log_probs(self, segment: TextSegment) -> Callable[..., NextTokenLogProbs]:
        scale = guided(segment)
        return NextTokenLogProbs if scale is None else partial(GuidedLogProbs, scale=scale)


def guided(segment: TextSegment) -> float | None:
    """The guidance scale of recorded images. None if they were sampled without guidance."""
    assert isinstance(segment, ImageTokenSegment), "images are recorded with their guidance scale"
    return segment.guidance_scale if segment.is_guided else None


def unconditional_of(conditions: Conditions) -> PromptTokens:
    """The prompts of the unconditional branch."""
    prompts = conditions[UNCONDITIONAL]
    assert isinstance(prompts, PromptTokens)
    return prompts


def image_token_segment(images: Sequence[Response], params: ImageTokenSamplingParams) -> ImageTokenSegment:
    """The sampled images as a packed segment on the CPU. An image with all of its tokens is finished."""
    segment = text_segment(images, params)
    return ImageTokenSegment(
        **vars(segment) | {"finished": torch.ones_like(segment.finished)}, guidance_scale=params.guidance_scale
    )
