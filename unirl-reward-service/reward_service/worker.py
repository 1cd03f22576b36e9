"""The process that holds one scorer.

    python -m reward_service.worker REWARD SOCKET

REWARD is the reward's name, shown in process lists. The process runs in the scorer's own environment, which needs this
package and `unirl` in addition to the scorer's libraries.
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
from unirl.reward.base import LocalRewardBackend, RewardScorer
from unirl.reward.client.wire import ItemError, Kind, MediaPayload, TextAnswer
from unirl.reward.registry import make_scorer
from unirl.reward.scoring import score_by_halves
from unirl.types.primitives import Videos
from unirl.types.reward import RewardRequest, RewardResponse

KINDS: dict[int, Kind] = {
    RewardError.code: "failed",
    InvalidScoreError.code: "not_finite",
    RewardUnreachableError.code: "unavailable",
}
COLUMNS = ("prompts", "images", "videos", "texts", "sources", "metadata")
TOTAL = "total"


def load(message: LoadScorer) -> RewardScorer:
    """Returns the scorer with its weights loaded. Raises UniRLError and the errors of the scorer's libraries."""
    if message.needs_cuda and not torch.cuda.is_available():
        raise DependencyError(
            f"reward {message.reward!r} needs a CUDA device, and this machine has none: write device: cpu"
        )
    scorer = make_scorer(message.scorer, message.params, toy=message.toy, plugins=message.plugins)
    for column in scorer.reads:
        if column not in COLUMNS:
            raise ConfigError(
                f"reward {message.reward!r} reads {column}, which clients do not send ({', '.join(COLUMNS)} are sent): "
                "score it in the process of the run"
            )
    if isinstance(scorer, LocalRewardBackend):
        _ = scorer.model
    return scorer


def outcomes(scorer: RewardScorer, rows: Sequence[ScorerRow], name: str) -> list[ItemOutcome]:
    """Returns one outcome per row, in their order. Rows with images or frames of the same size are scored together."""
    by_row: dict[int, ItemOutcome] = {}
    for group in same_size_groups(rows):
        for index, outcome in zip(group, _score(scorer, [rows[i] for i in group], name), strict=True):
            by_row[index] = outcome
    return [by_row[index] for index in range(len(rows))]


def same_size_groups(rows: Sequence[ScorerRow]) -> list[list[int]]:
    """Returns the indices of rows in groups whose images, or frames of videos, have the same size."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        media = row.image or row.video
        groups.setdefault(media and media.shape and media.shape[-3:], []).append(index)
    return list(groups.values())


def _score(scorer: RewardScorer, rows: Sequence[ScorerRow], name: str) -> list[ItemOutcome]:
    request = request_of(rows, scorer.reads)
    try:
        response = score_by_halves(scorer, request, name)
    except RewardError as error:  # the server that the scorer depends on cannot be reached
        return [ItemError(KINDS[error.code], str(error))] * len(rows)
    failed = set(response.failed_rows())
    return [_failure(response, row) if row in failed else _scores(response, row) for row in range(len(rows))]


def _failure(response: RewardResponse, row: int) -> ItemError:
    failure = response.failures[row][0]
    return ItemError(KINDS[failure.code], failure.why)


def _scores(response: RewardResponse, row: int) -> ItemScores:
    """Returns the total and the components of a row."""
    parts = {part: float(scores[row]) for part, scores in response.components.items() if part != TOTAL}
    answer = None if response.answers is None else response.answers[row]
    sent = None if answer is None else TextAnswer(right=answer.right, text=answer.text)
    return ItemScores({TOTAL: float(response.total[row])} | parts, sent)


def request_of(rows: Sequence[ScorerRow], reads: Sequence[str]) -> RewardRequest:
    """Returns the columns that the scorer reads. The service has checked that the rows have them."""
    return RewardRequest(
        sample_ids=[row.id for row in rows],
        prompts=[row.prompt or "" for row in rows] if "prompts" in reads else None,
        images=torch.stack([pixels(row.image) for row in rows]) if "images" in reads else None,
        videos=videos([row.video for row in rows]) if "videos" in reads else None,
        texts=[row.text or "" for row in rows] if "texts" in reads else None,
        sources=[[pixels(source) for source in row.sources] for row in rows] if "sources" in reads else None,
        metadata=[row.metadata or {} for row in rows] if "metadata" in reads else None,
    )


def pixels(payload: MediaPayload | None) -> Tensor:
    """Returns [3, H, W] or [F, 3, H, W] in [0, 1], with exactly the values of a rollout's rounded pixels."""
    assert payload is not None and payload.shape is not None
    levels = np.moveaxis(np.frombuffer(payload.data, np.uint8).reshape(payload.shape), -1, -3)
    return torch.from_numpy(levels.astype(np.float32, order="C")).div_(255)


def videos(media: Sequence[MediaPayload | None]) -> Videos:
    """Returns the videos with their frames concatenated."""
    frames = [pixels(payload) for payload in media]
    offsets = torch.tensor([0, *(len(each) for each in frames)]).cumsum(0)
    return Videos(frames=torch.cat(frames), offsets=offsets)


def serve(channel: Channel) -> None:
    """Loads the scorer that the first message names, then scores batches until the service ends."""
    message = channel.receive()
    assert isinstance(message, LoadScorer)
    try:
        scorer = load(message)
    except UniRLError as error:
        channel.send(ScorerNotLoaded(str(error), error.code, error.exit_status))
        return
    except Exception as error:  # the libraries of scorers may raise any error, and the service reports it
        channel.send(ScorerNotLoaded(f"reward {message.reward!r}: {type(error).__name__}: {error}", 3001, 3))
        return
    channel.send(ScorerLoaded(list(scorer.reads)))
    while True:
        batch = channel.receive()
        assert isinstance(batch, ScoreBatch)
        channel.send(BatchOutcomes(outcomes(scorer, batch.rows, message.reward)))


def main() -> None:
    # Standard output belongs to the service, so that prints of libraries go to standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    channel = Channel(int(sys.argv[-1]))
    end_with_parent()
    with suppress(PeerGone):
        serve(channel)


if __name__ == "__main__":
    main()
