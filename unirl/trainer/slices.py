"""Responses that pause, so that the engine can take over new weights while they are long under way.

    slice 1: 512 tokens by W_3  |  new weights  |  slice 2: 512 more by W_4  |  slice 3: the last 80 by W_4

Between two slices the loop may send weights. Every token keeps its log-prob and its version, and a response that never
met new weights has the same tokens as one that did not pause.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from unirl.rollout.engine.base import RolloutEngine
from unirl.trainer.requests import check_versions
from unirl.types.primitives import StartedResponses
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

Turn = Callable[[RolloutReq], AbstractContextManager[RolloutReq]]
"""Has the engine for a request in its block, and yields the request with the weights that the engine has."""


def sampled_in_slices(
    part: RolloutReq, turn: Turn, engine: RolloutEngine, slice_tokens: int
) -> tuple[RolloutReq, RolloutResp]:
    """The samples of a request of one text track. The version of a row is that of its oldest token.

    Args:
        slice_tokens: tokens that a response gets in one turn of the engine.
    """
    name, params = part.only_track(ARSamplingParams)
    waiting = list(range(len(part)))
    started = StartedResponses.empty(len(part), slice_tokens)
    ended: list[RolloutResp] = []
    order: list[int] = []
    sources = part.tracks
    while waiting:
        with turn(part.select(waiting).going_on(started)) as req:
            resp = engine.generate(req)
        check_versions(req, resp)
        sources = req.tracks
        segment = resp.tracks[name].sampled_as(TextSegment).segment
        is_over = (segment.finished | (segment.lengths.to(segment.finished.device) >= params.max_new_tokens)).tolist()
        over = [row for row, done in enumerate(is_over) if done]
        rest = [row for row, done in enumerate(is_over) if not done]
        ended += [resp.select(over)] if over else []
        order += [waiting[row] for row in over]
        waiting = [waiting[row] for row in rest]
        started = beginnings(segment.select(rest), slice_tokens)
    place = {row: number for number, row in enumerate(order)}
    whole = RolloutResp.concat(ended).select([place[row] for row in range(len(part))])
    track = whole.tracks[name].sampled_as(TextSegment)
    return part.replace(tracks=sources), whole.with_track(
        name, track.replace(weight_version=oldest_versions(track.segment))
    )


def beginnings(segment: TextSegment, slice_tokens: int) -> StartedResponses:
    """The responses of a segment, which are to go on."""
    assert segment.versions is not None, "an engine that pauses says which weights each token comes from"
    return StartedResponses(
        tokens=segment.tokens.cpu(),
        logp=segment.logp.cpu(),
        versions=segment.versions.cpu(),
        offsets=segment.offsets,
        pause_after=slice_tokens,
    )


def oldest_versions(segment: TextSegment) -> torch.Tensor:
    """[B] int64, the version of the oldest token of each row."""
    assert segment.versions is not None, "an engine that pauses says which weights each token comes from"
    rows = segment.versions.cpu().split(segment.lengths.tolist())
    return torch.stack([row.min() for row in rows])
