"""Requests to a rollout engine: rows of prompts and a tree of tracks to generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from unirl.types.batch import Batch, row, shared
from unirl.types.primitives import STARTED, MediaRef, MediaRefs, Metadata, PromptImages, StartedResponses, Texts
from unirl.types.sampling import Sampling, SamplingT, sampling_as

Purpose = Literal["r", "eval"]
"""`r` = rollout for training, whose noise keys contain the step; `eval` = evaluation, whose noise keys do not."""

RECORDED = "recorded"
"""Name of the primitive with references to recorded samples, and of the metadata key with the role of each."""


class WeightsInUse(Protocol):
    """Weights that an engine has."""

    @property
    def weights(self) -> str:
        """`live`, or the name of a snapshot."""

    @property
    def version(self) -> int:
        """Number of optimizer updates behind them."""


@dataclass(frozen=True, kw_only=True)
class TrackSpec:
    """One node of the tree of tracks: how its samples are drawn and which track they descend from."""

    parent: str | None = None
    branch: int = 1
    """Number of samples per row of the parent track."""
    sampling: Sampling
    weights: str = "live"
    """The weights to sample from: `live` or the name of a snapshot."""
    weight_version: int = 0
    """Number of optimizer updates behind these weights."""


@dataclass(kw_only=True, eq=False)
class RolloutReq(Batch):
    """Rows to generate. Samples of a group are adjacent, and the sampling settings are pinned by the driver."""

    sample_ids: list[str] = row()
    group_ids: list[str] = row()
    primitives: dict[str, Batch] = row()
    metadata: list[Metadata] = row()
    places: list[str] | None = row(optional=True)
    """File and line of each row's prompt, for messages."""
    tracks: dict[str, TrackSpec] = shared()
    purpose: Purpose = shared()
    step: int = shared()

    @property
    def weights(self) -> str:
        """The weights of all tracks. Raises ValueError if they differ."""
        return self._source()[0]

    @property
    def weight_version(self) -> int:
        """The version of the weights of all tracks. Raises ValueError if they differ."""
        return self._source()[1]

    def _source(self) -> tuple[str, int]:
        sources = {(spec.weights, spec.weight_version) for spec in self.tracks.values()}
        if len(sources) != 1:
            raise ValueError(f"the tracks {sorted(self.tracks)} are sampled from different weights: {sorted(sources)}")
        return sources.pop()

    def _only_spec(self) -> TrackSpec:
        if len(self.tracks) != 1:
            raise ValueError(f"this request asks for the tracks {sorted(self.tracks)}, not for one")
        [spec] = self.tracks.values()
        return spec

    def from_weights(self, weights: str, version: int) -> RolloutReq:
        """The request with other weights for its only track."""
        [name] = self.tracks
        return self.replace(tracks={name: replace(self._only_spec(), weights=weights, weight_version=version)})

    @property
    def started(self) -> StartedResponses | None:
        """The responses that go on. None if all of them begin and none pauses."""
        found = self.primitives.get(STARTED)
        assert found is None or isinstance(found, StartedResponses)
        return found

    def going_on(self, started: StartedResponses) -> RolloutReq:
        """The request for these responses to go on."""
        return self.replace(primitives={**self.primitives, STARTED: started})

    def sampled_from(self, sources: Mapping[str, WeightsInUse]) -> RolloutReq:
        """The request with the weights of `sources` for each track."""
        return self.replace(
            tracks={
                name: replace(spec, weights=sources[name].weights, weight_version=sources[name].version)
                for name, spec in self.tracks.items()
            }
        )

    def only_track(self, kind: type[SamplingT]) -> tuple[str, SamplingT]:
        """Name and sampling settings of the only track. Raises ValueError if there are more, or of another kind."""
        if len(self.tracks) != 1:
            raise ValueError(f"this pipeline generates one track; the request asks for {sorted(self.tracks)}")
        [(name, spec)] = self.tracks.items()
        return name, sampling_as(kind, spec.sampling, f"track {name!r} is sampled with")

    def prompts(self) -> list[str]:
        """The prompt of each row."""
        texts = self.primitives["text"]
        assert isinstance(texts, Texts)
        return texts.texts

    def prompt_image_uris(self) -> list[tuple[str, ...]]:
        """Paths or addresses of the images in the prompt of each row; () if it has none."""
        images = self.primitives.get("images")
        if not isinstance(images, PromptImages):
            return [()] * len(self)
        return [tuple(ref.uri for ref in refs) for refs in images.per_prompt]

    def expand(self, times: int) -> RolloutReq:
        """Every row repeated `times` times, with the sample ids `{group id}:{j}`. Samples of a group are adjacent."""
        wide = self.repeat_interleave(times)
        ids = [f"{group}:{i % times}" for i, group in enumerate(wide.group_ids)]
        return wide.replace(sample_ids=ids)

    def branched(self, track: str) -> RolloutReq:
        """The rows of a child track: `branch` copies of every row, with the sample ids `{parent}/{track}{j}`.

        A group is the children of one row.
        """
        branch = self.tracks[track].branch
        return self.repeat_interleave(branch).replace(
            sample_ids=child_ids(self.sample_ids, track, branch),
            group_ids=[parent for parent in self.sample_ids for _ in range(branch)],
        )

    def with_recorded(self, refs: Sequence[MediaRef]) -> RolloutReq:
        """The request for recorded samples. Row i is the file `refs[i]`; its metadata has the role of the reference."""
        return self.replace(
            primitives={**self.primitives, RECORDED: MediaRefs(refs=list(refs))},
            metadata=[{**metadata, RECORDED: ref.role} for metadata, ref in zip(self.metadata, refs, strict=True)],
        )


def group_id(prompt_id: str, epoch: int) -> str:
    """Id of the group of samples of a prompt in an epoch."""
    return f"{prompt_id}@{epoch}"


def child_ids(parents: Sequence[str], track: str, branch: int) -> list[str]:
    """Ids of `branch` children per parent: `{parent}/{track}{j}`. Children of one parent are adjacent."""
    return [f"{parent}/{track}{j}" for parent in parents for j in range(branch)]
