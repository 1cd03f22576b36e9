"""What is asked of a rollout: rows of prompts and a tree of tracks to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirl.types.batch import Batch, row, shared
from unirl.types.primitives import MediaRef, MediaRefs, PromptImages, Texts
from unirl.types.sampling import Sampling, SamplingT, sampling_as

Purpose = Literal["r", "eval"]
"""`r` = training rollout, whose noise depends on the step; `eval` = evaluation, whose noise does not."""

RECORDED = "recorded"
"""The primitive that says where samples lie which exist already, and the key of a row's metadata that says its role."""


@dataclass(frozen=True, kw_only=True)
class TrackSpec:
    """One node of the tree of tracks."""

    parent: str | None = None
    branch: int = 1
    """Children per parent row."""
    sampling: Sampling


@dataclass(kw_only=True, eq=False)
class RolloutReq(Batch):
    """Rows to generate, siblings of a group adjacent; sampling is pinned before the request leaves the driver."""

    sample_ids: list[str] = row()
    group_ids: list[str] = row()
    primitives: dict[str, Batch] = row()
    metadata: list[dict[str, Any]] = row()
    tracks: dict[str, TrackSpec] = shared()
    purpose: Purpose = shared()
    step: int = shared()
    weights: str = shared()
    """The weights to sample from: `live` or a snapshot's name."""
    weight_version: int = shared()
    """Optimizer updates that the wanted weights have seen."""

    def only_track(self, kind: type[SamplingT]) -> tuple[str, SamplingT]:
        """Name and sampling of the one track that is asked for. Raises ValueError for more, or of another kind."""
        if len(self.tracks) != 1:
            raise ValueError(f"this pipeline generates one track; the request asks for {sorted(self.tracks)}")
        [(name, spec)] = self.tracks.items()
        return name, sampling_as(kind, spec.sampling, f"track {name!r} is sampled by")

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
        """Every row `times` times, siblings adjacent, with sample ids `{group id}:{j}`."""
        wide = self.repeat_interleave(times)
        ids = [f"{group}:{i % times}" for i, group in enumerate(wide.group_ids)]
        return wide.replace(sample_ids=ids)

    def with_recorded(self, refs: Sequence[MediaRef]) -> RolloutReq:
        """The request for samples that exist already: row i lies at `refs[i]`. Its metadata names its role."""
        return self.replace(
            primitives={**self.primitives, RECORDED: MediaRefs(refs=list(refs))},
            metadata=[{**about, RECORDED: ref.role} for about, ref in zip(self.metadata, refs, strict=True)],
        )


def group_id(prompt_id: str, epoch: int) -> str:
    """The id of the group that a prompt makes in an epoch."""
    return f"{prompt_id}@{epoch}"


def child_ids(parents: Sequence[str], track: str, branch: int) -> list[str]:
    """Ids of `branch` children per parent, siblings adjacent: `{parent}/{track}{j}`."""
    return [f"{parent}/{track}{j}" for parent in parents for j in range(branch)]
