"""The reward role: scores the leaves of a response, strictly, and attaches the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, RewardError, did_you_mean
from unirl.distributed.group.dispatch import broadcast, scatter
from unirl.distributed.group.rank import current
from unirl.reward.base import DifferentiableScorer
from unirl.types.primitives import Images, Texts, Videos
from unirl.types.protocols import Scorer
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

COLUMNS = ("prompts", "images", "videos", "texts", "metadata")
MEDIA: dict[str, type[Any]] = {"images": Images, "videos": Videos, "texts": Texts}
"""Which kind of decoded media holds a column."""


class RewardService:
    """Holds one scorer, or a weighted set of them. Strict: a failure stops the step and is never a zero."""

    def __init__(self, *, backend: Scorer) -> None:
        """The scorer; several are combined by `unirl.reward.combine.WeightedRewards`."""
        for column in backend.reads:
            if column not in COLUMNS:
                raise ConfigError(
                    f"reward {name_of(backend)!r} reads {column!r}, which is no column of a reward request."
                    f"{did_you_mean(column, COLUMNS)} Choose among {', '.join(COLUMNS)}"
                )
        self.backend = backend

    @scatter(RolloutResp.concat, order=RolloutResp.select)
    def score_and_attach(self, req: RolloutReq, resp: RolloutResp) -> RolloutResp:
        """The response with rewards [B] and component rewards on every leaf track.

        Raises:
            RewardError: the scorer failed or answered with a missing, extra or non-finite score.
        """
        parents = {track.parent_track for track in resp.tracks.values()}
        for name in [name for name in resp.tracks if name not in parents]:
            track = resp.tracks[name]
            answer = checked_score(self.backend, self._request(req, resp, track), name_of(self.backend))
            resp = resp.with_track(name, track.replace(rewards=answer.total, component_rewards=answer.components))
        return resp

    def _request(self, req: RolloutReq, resp: RolloutResp, track: RolloutTrack) -> RewardRequest:
        if track.rewards is not None:
            raise RewardError(f"sample {track.sample_ids[0]!r} already has a reward: rewards are attached once")
        rows = root_rows(req, resp, track)
        texts: Any = req.primitives.get("text")
        reads = self.backend.reads
        for column in MEDIA.keys() & set(reads):
            self._check_medium(column, track)
        return RewardRequest(
            sample_ids=track.sample_ids,
            prompts=[texts.texts[row] for row in rows] if "prompts" in reads else None,
            images=track.decoded.pixels if "images" in reads else None,
            videos=track.decoded if "videos" in reads else None,
            texts=track.decoded.texts if "texts" in reads else None,
            metadata=[req.metadata[row] for row in rows] if "metadata" in reads else None,
        )

    def _check_medium(self, column: str, track: RolloutTrack) -> None:
        if not isinstance(track.decoded, MEDIA[column]):
            raise RewardError(
                f"reward {name_of(self.backend)!r} reads {column}, but the rollout decoded "
                f"{type(track.decoded).__name__} (sample {track.sample_ids[0]!r}): choose a reward for this modality"
            )

    def probe(self, request: RewardRequest) -> RewardResponse:
        """The scores of rows known to differ. Raises RewardError when all are equal: such a reward teaches nothing."""
        answer = checked_score(self.backend, request, name_of(self.backend))
        if len(request) > 1 and bool((answer.total == answer.total[0]).all()):
            raise RewardError(
                f"reward {name_of(self.backend)!r} gave {float(answer.total[0]):g} to all {len(request)} rows of the "
                "probe, which differ: check its metadata keys and its weights",
                code=6003,
            )
        return answer

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the total reward of pictures that are not rounded, with its gradient: for the loss of a sibling."""
        return objective_of(self.backend, images, prompts)

    @broadcast
    def offload(self, names: Sequence[str]) -> None:
        """Leave the device; `names` is the whole reward or nothing."""
        if names:
            self.backend.offload()
            current().free_unused()

    @broadcast
    def onload(self, names: Sequence[str]) -> None:
        """The inverse of `offload`."""
        if names:
            self.backend.onload()


def name_of(scorer: Scorer) -> str:
    """The name that errors give a scorer: its class."""
    return type(scorer).__name__


def objective_of(scorer: Scorer, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """[B] the scorer's total with its gradient, on the device of the images.

    Raises:
        RewardError: 6002 when the scorer has none, or gives another number of scores.
    """
    if not isinstance(scorer, DifferentiableScorer):
        raise RewardError(
            f"reward {name_of(scorer)!r} has no gradient: give it `objective(images, prompts)`, or choose another",
            code=6002,
        )
    scores = scorer.objective(images, prompts)
    if scores.shape != (len(images),):
        raise RewardError(
            f"reward {name_of(scorer)!r} gave an objective of shape {list(scores.shape)} for {len(images)} pictures: "
            "it must give one number per picture",
            code=6002,
        )
    return scores.to(images.device)


def root_rows(req: RolloutReq, resp: RolloutResp, track: RolloutTrack) -> list[int]:
    """The row of the request that each row of the track descends from."""
    ids = track.sample_ids
    while track.parent_track is not None:
        assert track.parent_ids is not None
        parent_of = dict(zip(track.sample_ids, track.parent_ids, strict=True))
        ids = [parent_of[sample] for sample in ids]
        track = resp.tracks[track.parent_track]
    row_of = {sample: row for row, sample in enumerate(req.sample_ids)}
    return [row_of[sample] for sample in ids]


def checked_score(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """The scorer's answer, given only the columns it reads: right count, finite, float32 on the CPU.

    Raises:
        RewardError: 6002 when the scorer fails or the count is wrong, 6003 when a score is not finite.
    """
    columns: dict[str, Any] = {column: request.__dict__[column] for column in scorer.reads}
    try:
        answer = scorer.score(RewardRequest(sample_ids=request.sample_ids, **columns))
    except RewardError:
        raise
    except Exception as error:  # a scorer is foreign code: whatever it raises, the user must learn which reward it was
        raise RewardError(
            f"reward {name!r} failed on {len(request)} samples from {request.sample_ids[0]!r} on: "
            f"{type(error).__name__}: {error}. No reward was attached; a failed reward is never counted as zero",
            code=6002,
        ) from error
    if not answer.components:
        raise RewardError(f"reward {name!r} answered without components: give each score a name", code=6002)
    total = checked(answer.total, request, name)
    components = {part: checked(scores, request, f"{name}.{part}") for part, scores in answer.components.items()}
    return RewardResponse(total=total, components=components)


def checked(scores: Tensor, request: RewardRequest, name: str) -> Tensor:
    """[B] float32 on the CPU. Raises RewardError naming the sample whose score is missing or not finite."""
    if scores.shape != (len(request),):
        raise RewardError(
            f"reward {name!r} gave scores of shape {list(scores.shape)} for {len(request)} samples "
            f"({request.sample_ids[0]!r} to {request.sample_ids[-1]!r}): it must give one number per sample",
            code=6002,
        )
    scores = scores.detach().float().cpu()
    bad = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"reward {name!r} gave {float(scores[bad[0]])} to sample {request.sample_ids[bad[0]]!r} "
            f"({len(bad)} of {len(request)} samples are not finite): a reward must be a finite number",
            code=6003,
        )
    return scores
