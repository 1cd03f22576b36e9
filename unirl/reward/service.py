"""The reward role: scores the leaf tracks of a response and attaches the rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from unirl.config.errors import ConfigError, DataError, InvalidScoreError, RewardError, did_you_mean
from unirl.distributed.group.dispatch import broadcast, rank0, scatter
from unirl.distributed.group.rank import current
from unirl.models.images import fit_image, read_image
from unirl.reward.base import RewardScorer
from unirl.reward.failures import STRICT, FailurePolicy
from unirl.reward.scoring import checked_score, name_of, objective_of
from unirl.types.primitives import Images, Texts, Videos
from unirl.types.reward import ResponseLength, RewardRequest, RewardResponse
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as
from unirl.types.segments import TextSegment

COLUMNS = ("prompts", "images", "videos", "texts", "lengths", "sources", "metadata")
Metadata = Mapping[str, object]
Columns = dict[str, Tensor]
DecodedT = TypeVar("DecodedT")


def with_rewards(track: RolloutTrack, response: RewardResponse, seconds: float) -> RolloutTrack:
    """Returns the track with the scores of its rows. Scoring took `seconds`."""
    return track.replace(
        rewards=response.total,
        component_rewards=response.components,
        logged_rewards=response.logged_rewards,
        failures=[response.failures.get(row, ()) for row in range(len(track))],
        answers=None if response.answers is None else list(response.answers),
        reward_seconds=torch.full((len(track),), seconds),
    )


def concat_scored(parts: Sequence[RolloutResp]) -> RolloutResp:
    """Joins scored responses. A component that a part lacks, because all its rows failed, is NaN in that part."""
    return RolloutResp.concat([_with_blanks(part, parts) for part in parts])


def _with_blanks(part: RolloutResp, parts: Sequence[RolloutResp]) -> RolloutResp:
    """Returns a part with all scores and answers that any part has: NaN and None where it has none."""
    for name, track in part.tracks.items():
        if track.rewards is not None:
            others = [other.tracks[name] for other in parts]
            blank = torch.full_like(track.rewards, torch.nan)
            answers = [None] * len(track) if any(other.answers is not None for other in others) else None
            track = track.replace(
                component_rewards=_columns(track.component_rewards, [o.component_rewards for o in others], blank),
                logged_rewards=_columns(track.logged_rewards, [o.logged_rewards for o in others], blank),
                answers=answers if track.answers is None else track.answers,
            )
            part = part.with_track(name, track)
    return part


def _columns(own: Columns | None, all_columns: Sequence[Columns | None], blank: Tensor) -> Columns:
    return {name: (own or {}).get(name, blank) for columns in all_columns for name in columns or {}}


class RewardService:
    """Holds one scorer or a weighted set of scorers. By default, the first sample without a score stops the run."""

    def __init__(self, *, backend: RewardScorer, on_failure: FailurePolicy = STRICT) -> None:
        """
        Args:
            backend: the scorer. `unirl.reward.combine.WeightedRewards` combines several.
            on_failure: the policy for samples that cannot be scored.
        """
        for column in backend.reads:
            if column not in COLUMNS:
                raise ConfigError(
                    f"reward {name_of(backend)!r} reads {column!r}, which is not a column of a reward request."
                    f"{did_you_mean(column, COLUMNS)} Choose among {', '.join(COLUMNS)}"
                )
        self.backend = backend
        self.on_failure = on_failure

    @scatter(concat_scored, order=RolloutResp.select, unread=("conditions", "segment"))
    def score_and_attach(self, req: RolloutReq, resp: RolloutResp) -> RolloutResp:
        """Returns the response with rewards [B] and component rewards on every leaf track.

        If `on_failure` allows samples of weight 0, a sample that cannot be scored gets the reward NaN, and its failures
        give the reason. Otherwise RewardError is raised.
        """
        parents = {track.parent_track for track in resp.tracks.values()}
        for name in [name for name in resp.tracks if name not in parents]:
            track = resp.tracks[name]
            begin = time.perf_counter()
            response = self.on_failure.score(self.backend, self._request(req, resp, name), name_of(self.backend))
            resp = resp.with_track(name, with_rewards(track, response, time.perf_counter() - begin))
        return resp

    def _request(self, req: RolloutReq, resp: RolloutResp, name: str) -> RewardRequest:
        track = resp.tracks[name]
        if track.rewards is not None:
            raise RewardError(f"sample {track.sample_ids[0]!r} already has a reward: rewards are attached once")
        rows, uris = root_rows(req, resp, track), req.prompt_image_uris()
        reads = self.backend.reads
        return RewardRequest(
            sample_ids=track.sample_ids,
            lengths=self._lengths(req.tracks[name].sampling, track) if "lengths" in reads else None,
            prompts=[req.prompts()[row] for row in rows] if "prompts" in reads else None,
            images=self._decoded_as(Images, "images", track).pixels if "images" in reads else None,
            videos=self._decoded_as(Videos, "videos", track) if "videos" in reads else None,
            texts=self._decoded_as(Texts, "texts", track).texts if "texts" in reads else None,
            sources=self._sources([uris[row] for row in rows], track) if "sources" in reads else None,
            metadata=[req.metadata[row] for row in rows] if "metadata" in reads else None,
        )

    def _lengths(self, sampling: Sampling, track: RolloutTrack) -> list[ResponseLength]:
        """Returns the number of tokens of each text [B] of a track and the limit at which sampling cuts it off."""
        self._decoded_as(Texts, "lengths", track)
        limit = sampling_as(ARSamplingParams, sampling, "the track of the responses is sampled with").max_new_tokens
        return [ResponseLength(tokens, limit) for tokens in track.sampled_as(TextSegment).segment.lengths.tolist()]

    def _sources(self, uris: Sequence[tuple[str, ...]], track: RolloutTrack) -> list[list[Tensor]]:
        """Returns the source images of each row's prompt, cropped to the sample's size as the model saw them.

        Each file is read once.
        """
        height, width = self._decoded_as(Images, "images", track).pixels.shape[-2:]
        for sample, sample_uris in zip(track.sample_ids, uris, strict=True):
            if not sample_uris:
                raise RewardError(
                    f"reward {name_of(self.backend)!r} compares a sample with its source image, and the prompt of "
                    f"sample {sample!r} has no image: give it media_refs of role condition"
                )
        distinct = dict.fromkeys(uri for sample_uris in uris for uri in sample_uris)
        opened = {uri: fit_image(read_image(uri), height, width) for uri in distinct}
        return [[opened[uri] for uri in sample_uris] for sample_uris in uris]

    def _decoded_as(self, kind: type[DecodedT], column: str, track: RolloutTrack) -> DecodedT:
        """Returns the decoded media of the track, which hold `column`. Raises RewardError if they have another type."""
        if not isinstance(track.decoded, kind):
            raise RewardError(
                f"reward {name_of(self.backend)!r} reads {column}, but the rollout decoded "
                f"{type(track.decoded).__name__} (sample {track.sample_ids[0]!r}): choose a reward for this modality"
            )
        return track.decoded

    @rank0
    def check_prompts(self, prompts: Sequence[str], metadata: Sequence[Metadata], ids: Sequence[str]) -> None:
        """Checks, before anything is generated, the scorer's server and every prompt.

        Raises:
            RewardError, ConfigError: the server that the scorer depends on cannot be used from this process.
            DataError: 4002 a prompt lacks something that the scorer needs; the message names the prompt.
        """
        self.backend.check_start()
        for prompt, prompt_metadata, prompt_id in zip(prompts, metadata, ids, strict=True):
            try:
                self.backend.check_prompt(prompt, prompt_metadata)
            except RewardError as error:
                raise DataError(
                    f"prompt {prompt_id!r} has no sample that reward {name_of(self.backend)!r} could score: {error}"
                ) from error

    def probe(self, request: RewardRequest) -> RewardResponse:
        """Returns the scores of rows that differ. Raises RewardError when all are equal, since they carry no signal."""
        response = checked_score(self.backend, request, name_of(self.backend))
        if len(request) > 1 and bool((response.total == response.total[0]).all()):
            raise InvalidScoreError(
                f"reward {name_of(self.backend)!r} gave {float(response.total[0]):g} to all {len(request)} rows of the "
                "probe, which differ: check its metadata keys and its weights"
            )
        return response

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Returns the differentiable total reward [B] of images that are not rounded, for losses in this process."""
        return objective_of(self.backend, images, prompts)

    @broadcast
    def offload(self, names: Sequence[str]) -> None:
        """Moves the scorer off the device unless `names` is empty. A reward cannot be moved in parts."""
        if names:
            self.backend.offload()
            current().free_unused()

    @broadcast
    def onload(self, names: Sequence[str]) -> None:
        """Moves the scorer back to the device unless `names` is empty."""
        if names:
            self.backend.onload()


def root_rows(req: RolloutReq, resp: RolloutResp, track: RolloutTrack) -> list[int]:
    """Returns, for each row of the track, the row of the request that it descends from."""
    ids = track.sample_ids
    while track.parent_track is not None:
        assert track.parent_ids is not None
        parent_of = dict(zip(track.sample_ids, track.parent_ids, strict=True))
        ids = [parent_of[sample] for sample in ids]
        track = resp.tracks[track.parent_track]
    row_of = {sample: row for row, sample in enumerate(req.sample_ids)}
    return [row_of[sample] for sample in ids]
