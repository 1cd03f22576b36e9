"""The process that holds one scorer.

    python -m reward_service.worker REWARD SOCKET

The name is for those who list processes. It runs in the scorer's own environment, which needs this package and `unirl`
beside the scorer's libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from reward_service.frames import (
    BatchOutcomes,
    Channel,
    ItemOutcome,
    ItemScores,
    LoadScorer,
    PeerGone,
    ScoreBatch,
    ScorerLoaded,
    ScorerNotLoaded,
    ScorerRow,
    end_with_parent,
)
from unirl.config.errors import (
    ConfigError,
    DependencyError,
    InvalidScoreError,
    RewardError,
    RewardUnreachableError,
    UniRLError,
)
from unirl.reward.base import LocalRewardBackend
from unirl.reward.client.wire import ItemError, Kind, MediaPayload, TextAnswer
from unirl.reward.registry import make_scorer
from unirl.reward.scoring import score_by_halves
from unirl.types.primitives import Videos
from unirl.types.protocols import Scorer
from unirl.types.reward import RewardRequest, RewardResponse

KINDS: dict[int, Kind] = {
    RewardError.code: "failed",
    InvalidScoreError.code: "not_finite",
    RewardUnreachableError.code: "unavailable",
}
COLUMNS = ("prompts", "images", "videos", "texts", "sources", "metadata")
TOTAL = "total"


def built(asked: LoadScorer) -> Scorer:
    """The scorer with its weights loaded. Raises UniRLError, and what its libraries raise."""
    if asked.needs_cuda and not torch.cuda.is_available():
        raise DependencyError(f"reward {asked.reward!r} asks for a CUDA device and there is none: device: cpu")
    scorer = make_scorer(asked.scorer, asked.params, toy=asked.toy, plugins=asked.plugins)
    for column in scorer.reads:
        if column not in COLUMNS:
            raise ConfigError(
                f"reward {asked.reward!r} reads {column}, which does not travel ({', '.join(COLUMNS)} do): "
                "score it in the process of the run"
            )
    if isinstance(scorer, LocalRewardBackend):
        _ = scorer.model
    return scorer


def outcomes(scorer: Scorer, rows: Sequence[ScorerRow], name: str) -> list[ItemOutcome]:
    """One outcome per row, in their order; rows whose media have one size are scored together."""
    found: dict[int, ItemOutcome] = {}
    for places in alike(rows):
        for place, outcome in zip(places, _scored(scorer, [rows[i] for i in places], name), strict=True):
            found[place] = outcome
    return [found[place] for place in range(len(rows))]


def alike(rows: Sequence[ScorerRow]) -> list[list[int]]:
    """The places of rows that can be one request: their pictures, and the frames of their videos, have one size."""
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        media = row.image or row.video
        groups.setdefault(media and media.shape and media.shape[-3:], []).append(place)
    return list(groups.values())


def _scored(scorer: Scorer, rows: Sequence[ScorerRow], name: str) -> list[ItemOutcome]:
    request = request_of(rows, scorer.reads)
    try:
        answer = score_by_halves(scorer, request, name)
    except RewardError as error:  # what the scorer itself asks cannot be reached
        return [ItemError(KINDS[error.code], str(error))] * len(rows)
    lost = set(answer.lost())
    return [_failure(answer, row) if row in lost else _scores(answer, row) for row in range(len(rows))]


def _failure(answer: RewardResponse, row: int) -> ItemError:
    failure = answer.failures[row][0]
    return ItemError(KINDS[failure.code], failure.why)


def _scores(answer: RewardResponse, row: int) -> ItemScores:
    """The total, and the components unless the total is the only one."""
    parts = {part: float(scores[row]) for part, scores in answer.components.items() if part != TOTAL}
    said = None if answer.answers is None else answer.answers[row]
    told = None if said is None else TextAnswer(right=said.right, text=said.text)
    return ItemScores({TOTAL: float(answer.total[row])} | parts, told)


def request_of(rows: Sequence[ScorerRow], reads: Sequence[str]) -> RewardRequest:
    """The rows as the columns that the scorer reads; the service has checked that they have them."""
    return RewardRequest(
        sample_ids=[row.id for row in rows],
        prompts=[row.prompt or "" for row in rows] if "prompts" in reads else None,
        images=torch.stack([pixels(row.image) for row in rows]) if "images" in reads else None,
        videos=videos([row.video for row in rows]) if "videos" in reads else None,
        texts=[row.text or "" for row in rows] if "texts" in reads else None,
        sources=[[pixels(source) for source in row.sources] for row in rows] if "sources" in reads else None,
        metadata=[row.metadata or {} for row in rows] if "metadata" in reads else None,
    )


def pixels(medium: MediaPayload | None) -> Tensor:
    """[3, H, W] or [F, 3, H, W] in [0, 1]: the very values that a rollout's own rounding gives."""
    assert medium is not None and medium.shape is not None
    levels = np.moveaxis(np.frombuffer(medium.data, np.uint8).reshape(medium.shape), -1, -3)
    return torch.from_numpy(levels.astype(np.float32, order="C")).div_(255)


def videos(media: Sequence[MediaPayload | None]) -> Videos:
    """Their frames end to end."""
    frames = [pixels(medium) for medium in media]
    offsets = torch.tensor([0, *(len(each) for each in frames)]).cumsum(0)
    return Videos(frames=torch.cat(frames), offsets=offsets)


def serve(channel: Channel) -> None:
    """LoadScorer the scorer that the first message asks for, then score until the service is gone."""
    asked = channel.receive()
    assert isinstance(asked, LoadScorer)
    try:
        scorer = built(asked)
    except UniRLError as error:
        channel.send(ScorerNotLoaded(str(error), error.code, error.exit_status))
        return
    except Exception as error:  # libraries of scorers raise anything while they load; the service reports it
        channel.send(ScorerNotLoaded(f"reward {asked.reward!r}: {type(error).__name__}: {error}", 3001, 3))
        return
    channel.send(ScorerLoaded(list(scorer.reads)))
    while True:
        batch = channel.receive()
        assert isinstance(batch, ScoreBatch)
        channel.send(BatchOutcomes(outcomes(scorer, batch.rows, asked.reward)))


def main() -> None:
    # What libraries print must not be lost, and standard output belongs to the service.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    channel = Channel(int(sys.argv[-1]))
    end_with_parent()
    with suppress(PeerGone):
        serve(channel)


if __name__ == "__main__":
    main()
