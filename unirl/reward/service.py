"""The reward role: scores the last tracks of a response and those with rewards of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from unirl.config.errors import (
    DataError,
    IncompatibleError,
    InvalidScoreError,
    RewardError,
)
from unirl.config.tracks import no_such_track
from unirl.distributed.group.dispatch import broadcast, rank0, scatter
from unirl.distributed.group.rank import current
from unirl.models.images import fit_image, read_image
from unirl.reward.base import RewardScorer
from unirl.reward.contract import check_scorer
from unirl.reward.failures import STRICT, FailurePolicy
from unirl.reward.scoring import checked_score, name_of, objective_of, unscorable
from unirl.types.primitives import Episodes, Images, Texts, Videos
from unirl.types.reward import ResponseLength, RewardRequest, RewardResponse
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, Sampling, sampling_as
from unirl.types.segments import TextSegment

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


@dataclass(frozen=True)
class DecodedMedia:
    """The decoded samples of a track, for one scorer."""

    reward: str
    """The name of the scorer, for errors."""
    track: RolloutTrack

    def lengths(self, sampling: Sampling) -> list[ResponseLength]:
        """Returns the number of tokens of each text [B] and the limit at which sampling cuts it off."""
        self.of(Texts, "lengths")
        limit = sampling_as(ARSamplingParams, sampling, "the track of the responses is sampled with").max_new_tokens
        tokens = self.track.sampled_as(TextSegment).segment.lengths.tolist()
        return [ResponseLength(count, limit) for count in tokens]

    def sources(self, uris: Sequence[tuple[str, ...]]) -> list[list[Tensor]]:
        """Returns the source images of each row's prompt, cropped to the sample's size as the model saw them.

        Each file is read once.
        """
        height, width = self.of(Images, "images").pixels.shape[-2:]
        for sample, sample_uris in zip(self.track.sample_ids, uris, strict=True):
            if not sample_uris:
                raise RewardError(
                    f"reward {self.reward!r} compares a sample with its source image, and the prompt of "
                    f"sample {sample!r} has no image: give it media_refs of role condition"
                )
        distinct = dict.fromkeys(uri for sample_uris in uris for uri in sample_uris)
        opened = {uri: fit_image(read_image(uri), height, width) for uri in distinct}
        return [[opened[uri] for uri in sample_uris] for sample_uris in uris]

    def of(self, kind: type[DecodedT], column: str) -> DecodedT:
        """Returns the media, which hold `column`. Raises RewardError if they have another type."""
        decoded = self.track.decoded
        if not isinstance(decoded, kind):
            raise RewardError(
                f"reward {self.reward!r} reads {column}, but the rollout decoded {type(decoded).__name__} (sample "
                f"{self.track.sample_ids[0]!r}): choose a reward for this modality"
            )
        return decoded


@dataclass(frozen=True, kw_only=True)
class TrackReward:
    """The reward of a track whose samples are continued by another track, such as the rewrites of prompts."""

    backend: RewardScorer
    """Scores the samples of this track, for the prompt of the data."""
    weight: float = 1.0
    """The reward of a sample is weight x its score + the reward that comes from the samples that continue it."""
    with_credit: bool = True
    """False: the reward of a sample is weight x its score alone, and the samples that continue it do not count."""


class RewardService:
    """Holds one scorer or a weighted set of scorers. By default, the first sample without a score stops the run."""

    def __init__(
        self,
        *,
        backend: RewardScorer,
        tracks: Mapping[str, TrackReward] | None = None,
        on_failure: FailurePolicy = STRICT,
    ) -> None:
        """
        Args:
            backend: the scorer of the last track. `unirl.reward.combine.WeightedRewards` combines several.
            tracks: rewards of other tracks by name, such as `ar` for the rewrites of prompts. They are added to the
                rewards that these tracks get by the rule `credit`.
            on_failure: the policy for samples that cannot be scored.
        """
        self.backend = backend
        self.tracks = dict(tracks or {})
        self.on_failure = on_failure
        for scorer in self.scorers:
            check_scorer(scorer)

    @property
    def scorers(self) -> tuple[RewardScorer, ...]:
        """The scorer of the last track, then those of other tracks."""
        return (self.backend, *(own.backend for own in self.tracks.values()))

    @scatter(concat_scored, order=RolloutResp.select, unread=("conditions", "segment"))
    def score_and_attach(self, req: RolloutReq, resp: RolloutResp) -> RolloutResp:
        """Returns the response with rewards [B] and component rewards on every leaf track and every track in `tracks`.

        If `on_failure` allows samples of weight 0, a sample that cannot be scored gets the reward NaN, and its failures
        give the reason. Otherwise RewardError is raised.

        Raises:
            IncompatibleError: 2020 the response lacks a track in `tracks`, or two tracks have a component of one name.
        """
        for name in self.tracks.keys() - resp.tracks.keys():
            raise IncompatibleError(no_such_track(name, list(resp.tracks)))
        parents = {track.parent_track for track in resp.tracks.values()}
        for name in resp.tracks:
            if name in self.tracks:
                resp = resp.with_track(name, self._scored_by_its_own(self.tracks[name], req, resp, name))
            elif name not in parents:
                resp = resp.with_track(name, self._scored(self.backend, req, resp, name))
        self._check_components(resp)
        return resp

    def _check_components(self, resp: RolloutResp) -> None:
        """Checks that no track has a component of its own that another one has, so that names say what was scored."""
        owner: dict[str, str] = {}
        for name, track in resp.tracks.items():
            for part in {**(track.component_rewards or {}), **(track.logged_rewards or {})}:
                other = owner.setdefault(part, name)
                if other != name and {other, name} & self.tracks.keys():
                    raise IncompatibleError(same_component(part, other, name))

    def _scored(self, scorer: RewardScorer, req: RolloutReq, resp: RolloutResp, name: str) -> RolloutTrack:
        begin = time.perf_counter()
        response = self.on_failure.score(scorer, self._request(scorer, req, resp, name), name_of(scorer))
        return with_rewards(resp.tracks[name], response, time.perf_counter() - begin)

    def _scored_by_its_own(self, own: TrackReward, req: RolloutReq, resp: RolloutResp, name: str) -> RolloutTrack:
        track = self._scored(own.backend, req, resp, name)
        assert track.rewards is not None
        return track.replace(rewards=own.weight * track.rewards, rewards_are_final=not own.with_credit)

    def _request(self, scorer: RewardScorer, req: RolloutReq, resp: RolloutResp, name: str) -> RewardRequest:
        track = resp.tracks[name]
        if track.rewards is not None:
            raise RewardError(f"sample {track.sample_ids[0]!r} already has a reward: rewards are attached once")
        rows, uris = root_rows(req, resp, track), req.prompt_image_uris()
        reads, media = scorer.reads, DecodedMedia(name_of(scorer), track)
        return RewardRequest(
            sample_ids=track.sample_ids,
            lengths=media.lengths(req.tracks[name].sampling) if "lengths" in reads else None,
            prompts=[req.prompts()[row] for row in rows] if "prompts" in reads else None,
            images=media.of(Images, "images").pixels if "images" in reads else None,
            videos=media.of(Videos, "videos") if "videos" in reads else None,
            texts=media.of(Texts, "texts").texts if "texts" in reads else None,
            episodes=media.of(Episodes, "episodes") if "episodes" in reads else None,
            sources=media.sources([uris[row] for row in rows]) if "sources" in reads else None,
            metadata=[req.metadata[row] for row in rows] if "metadata" in reads else None,
            places=None if req.places is None else [req.places[row] for row in rows],
        )

    @rank0
    def check_prompts(self, prompts: Sequence[str], metadata: Sequence[Metadata], places: Sequence[str]) -> None:
        """Checks, before anything is generated, the server of each scorer and every prompt.

        Args:
            places: file and line of each prompt.

        Raises:
            RewardError, ConfigError: the server that a scorer depends on cannot be used from this process.
            DataError: 4002 a prompt lacks something that a scorer needs; the message names its place.
        """
        for scorer in self.scorers:
            scorer.check_start()
        for prompt, prompt_metadata, place in zip(prompts, metadata, places, strict=True):
            for why in unscorable(self.scorers, prompt, prompt_metadata):
                raise DataError(f"{place}: {why}")

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
        """Moves all scorers off the device unless `names` is empty. A reward cannot be moved in parts."""
        if names:
            for scorer in self.scorers:
                scorer.offload()
            current().free_unused()

    @broadcast
    def onload(self, names: Sequence[str]) -> None:
        """Moves all scorers back to the device unless `names` is empty."""
        if names:
            for scorer in self.scorers:
                scorer.onload()


def same_component(part: str, track: str, other: str) -> str:
    """The message for two tracks with a component of one name."""
    return (
        f"the rewards of the tracks {track} and {other} both have a component '{part}', and a name must say which "
        "samples were scored. Put one of the scorers into unirl.reward.combine.WeightedRewards, under another name"
    )


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
