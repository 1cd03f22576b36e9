"""The reward role: scores the leaves of a response, strictly, and attaches the rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, DataError, InvalidScoreError, RewardError, did_you_mean
from unirl.distributed.group.dispatch import broadcast, rank0, scatter
from unirl.distributed.group.rank import current
from unirl.models.images import fit_image, read_image
from unirl.reward.failures import STRICT, FailurePolicy
from unirl.reward.scoring import check_prompt, check_start, checked_score, joined_answers, name_of, objective_of
from unirl.types.primitives import Images, Texts, Videos
from unirl.types.protocols import Scorer
from unirl.types.reward import ResponseLength, RewardRequest, RewardResponse
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

COLUMNS = ("prompts", "images", "videos", "texts", "lengths", "sources", "metadata")
DecodedT = TypeVar("DecodedT", Images, Videos, Texts)


def attached(track: RolloutTrack, answer: RewardResponse, seconds: float) -> RolloutTrack:
    """The track with the scores of its rows, which took `seconds`."""
    return track.replace(
        rewards=answer.total,
        component_rewards=answer.components,
        logged_rewards=answer.logged_rewards,
        failures=[answer.failures.get(row, ()) for row in range(len(track))],
        answers=None if answer.answers is None else list(answer.answers),
        reward_seconds=torch.full((len(track),), seconds),
    )


def concat_scored(parts: Sequence[RolloutResp]) -> RolloutResp:
    """One scored response from several. A score that a part lacks, because all its rows failed, is NaN there."""
    for field in ("component_rewards", "logged_rewards"):
        parts = _same_columns(parts, field)
    return RolloutResp.concat(_same_answers(parts))


def _same_answers(parts: Sequence[RolloutResp]) -> list[RolloutResp]:
    """The parts, whose tracks all have answers where that of any part has some."""
    filled = list(parts)
    for name in parts[0].tracks:
        tracks = [part.tracks[name] for part in parts]
        answers = joined_answers([(track.answers, len(track)) for track in tracks])
        if answers is not None:
            rows = iter(answers)
            filled = [
                part.with_track(name, track.replace(answers=list(islice(rows, len(track)))))
                for part, track in zip(filled, tracks, strict=True)
            ]
    return filled


def _same_columns(parts: Sequence[RolloutResp], field: str) -> list[RolloutResp]:
    filled = []
    for part in parts:
        for name, track in part.tracks.items():
            if track.rewards is not None:
                names = dict.fromkeys(key for other in parts for key in getattr(other.tracks[name], field))
                blank = torch.full_like(track.rewards, torch.nan)
                columns = {key: getattr(track, field).get(key, blank) for key in names}
                part = part.with_track(name, track.replace(**{field: columns}))
        filled.append(part)
    return filled


class RewardService:
    """Holds one scorer, or a weighted set of them. A failure is never a zero: strict, it stops the step."""

    def __init__(self, *, backend: Scorer, on_failure: FailurePolicy = STRICT) -> None:
        """
        Args:
            backend: the scorer; several are combined by `unirl.reward.combine.WeightedRewards`.
            on_failure: what becomes of samples that cannot be scored.
        """
        for column in backend.reads:
            if column not in COLUMNS:
                raise ConfigError(
                    f"reward {name_of(backend)!r} reads {column!r}, which is no column of a reward request."
                    f"{did_you_mean(column, COLUMNS)} Choose among {', '.join(COLUMNS)}"
                )
        self.backend = backend
        self.on_failure = on_failure

    @scatter(concat_scored, order=RolloutResp.select)
    def score_and_attach(self, req: RolloutReq, resp: RolloutResp) -> RolloutResp:
        """The response with rewards [B] and component rewards on every leaf track.

        A sample that cannot be scored has the reward NaN and says why, where `on_failure` lets some be dropped.

        Raises:
            RewardError: the scorer failed or answered with a missing, extra or non-finite score.
        """
        parents = {track.parent_track for track in resp.tracks.values()}
        for name in [name for name in resp.tracks if name not in parents]:
            track = resp.tracks[name]
            begin = time.perf_counter()
            answer = self.on_failure.score(self.backend, self._request(req, resp, name), name_of(self.backend))
            resp = resp.with_track(name, attached(track, answer, time.perf_counter() - begin))
        return resp

    def _request(self, req: RolloutReq, resp: RolloutResp, name: str) -> RewardRequest:
        track = resp.tracks[name]
        if track.rewards is not None:
            raise RewardError(f"sample {track.sample_ids[0]!r} already has a reward: rewards are attached once")
        rows = root_rows(req, resp, track)
        texts: Any = req.primitives.get("text")
        reads = self.backend.reads
        if "lengths" in reads:
            self._decoded_as(Texts, "lengths", track)
        return RewardRequest(
            sample_ids=track.sample_ids,
            lengths=response_lengths(req.tracks[name].sampling, track) if "lengths" in reads else None,
            prompts=[texts.texts[row] for row in rows] if "prompts" in reads else None,
            images=self._decoded_as(Images, "images", track).pixels if "images" in reads else None,
            videos=self._decoded_as(Videos, "videos", track) if "videos" in reads else None,
            texts=self._decoded_as(Texts, "texts", track).texts if "texts" in reads else None,
            sources=self._sources(req.prompt_image_uris(), rows, track) if "sources" in reads else None,
            metadata=[req.metadata[row] for row in rows] if "metadata" in reads else None,
        )

    def _sources(
        self, pictures: Sequence[tuple[str, ...]], rows: Sequence[int], track: RolloutTrack
    ) -> list[list[Tensor]]:
        """What the prompt of each row brought, as the model saw it: cut to the sample's size, each file read once."""
        height, width = self._decoded_as(Images, "images", track).pixels.shape[-2:]
        uris = [pictures[row] for row in rows]
        for sample, brought in zip(track.sample_ids, uris, strict=True):
            if not brought:
                raise RewardError(
                    f"reward {name_of(self.backend)!r} compares with the picture that was edited, and the prompt of "
                    f"sample {sample!r} brought none: give it media_refs of role condition"
                )
        distinct = dict.fromkeys(uri for brought in uris for uri in brought)
        opened = {uri: fit_image(read_image(uri), height, width) for uri in distinct}
        return [[opened[uri] for uri in brought] for brought in uris]

    def _decoded_as(self, kind: type[DecodedT], column: str, track: RolloutTrack) -> DecodedT:
        """The decoded media of the track, which hold `column`. Raises RewardError when they are of another kind."""
        if not isinstance(track.decoded, kind):
            raise RewardError(
                f"reward {name_of(self.backend)!r} reads {column}, but the rollout decoded "
                f"{type(track.decoded).__name__} (sample {track.sample_ids[0]!r}): choose a reward for this modality"
            )
        return track.decoded

    @rank0
    def check_prompts(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> None:
        """Before anything is drawn: whether what the scorer asks is there, and every prompt has what it needs.

        Raises:
            RewardError, ConfigError: from this process, what the scorer asks elsewhere is not there.
            DataError: 4002 naming the prompt of which no sample could be scored, as far as its text says.
        """
        check_start(self.backend)
        for prompt, about, prompt_id in zip(prompts, metadata, ids, strict=True):
            try:
                check_prompt(self.backend, prompt, about)
            except RewardError as error:
                raise DataError(
                    f"prompt {prompt_id!r} has no sample that reward {name_of(self.backend)!r} could score: {error}"
                ) from error

    def probe(self, request: RewardRequest) -> RewardResponse:
        """The scores of rows known to differ. Raises RewardError when all are equal: such a reward teaches nothing."""
        answer = checked_score(self.backend, request, name_of(self.backend))
        if len(request) > 1 and bool((answer.total == answer.total[0]).all()):
            raise InvalidScoreError(
                f"reward {name_of(self.backend)!r} gave {float(answer.total[0]):g} to all {len(request)} rows of the "
                "probe, which differ: check its metadata keys and its weights"
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


def response_lengths(sampling: Any, track: RolloutTrack) -> list[ResponseLength]:
    """[B] tokens of each text of a track, and where sampling cuts them off."""
    return [ResponseLength(tokens, sampling.max_new_tokens) for tokens in track.segment.lengths.tolist()]


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
