"""Requests to an engine. They contain every decision, so that two engines given one request do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.config.errors import SyncError
from unirl.data.data_source import sizes_of
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.distributed.weight_sync.base import SyncReport
from unirl.types.batch import Batch
from unirl.types.facts import ModelFacts
from unirl.types.primitives import PromptImages, Texts
from unirl.types.rollout_req import Purpose, RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class TrackSampling:
    """The sampling settings of one track."""

    facts: ModelFacts
    parent: str | None = None
    """The track whose samples this one continues. The samples per prompt are then those per parent."""
    training: Sampling
    """Settings of training samples."""
    evaluation: Sampling
    """Settings of evaluation samples."""
    eval_weights: str = "live"
    """The weights that evaluation samples from: `live`, or a snapshot."""


@dataclass(frozen=True, kw_only=True)
class RequestMaker:
    """Makes the requests of one run: P prompts of one size become P x N samples of the root track."""

    tracks: Mapping[str, TrackSampling]
    """By name, the root first, every parent before its children."""

    def training(self, prompts: Sequence[Prompt], step: int, published: Mapping[str, SyncReport]) -> RolloutReq:
        """A request of one training step.

        If the prompts have recorded samples, the request is for these instead of new ones.

        Args:
            published: by track, the weights that were pushed.
        """
        specs = {
            name: self._spec(name, track.training, prompts, step, published[name].weights, published[name].version)
            for name, track in self.tracks.items()
        }
        req = self._request(prompts, specs, step, "r")
        recorded = [ref for prompt in prompts for ref in prompt.recorded]
        return req.with_recorded(recorded) if recorded else req

    def evaluation(self, prompts: Sequence[Prompt], versions: Mapping[str, int]) -> RolloutReq:
        """A request for held-out prompts. Its randomness does not depend on the step.

        Args:
            versions: by track, optimizer updates behind the weights that are evaluated.
        """
        specs = {
            name: self._spec(name, track.evaluation, prompts, 0, track.eval_weights, versions[name])
            for name, track in self.tracks.items()
        }
        return self._request(prompts, specs, 0, "eval")

    def primitives(self, prompts: Sequence[Prompt]) -> dict[str, Batch]:
        """The text of each prompt, and its images if any of the prompts has images.

        Raises:
            DataError: a prompt has fewer or more images than the model takes.
        """
        check_counts(prompts, next(iter(self.tracks.values())).facts)
        primitives: dict[str, Batch] = {"text": Texts(texts=[prompt.text for prompt in prompts])}
        if any(prompt.images for prompt in prompts):
            primitives["images"] = PromptImages(per_prompt=[prompt.images for prompt in prompts])
        return primitives

    def _spec(
        self, name: str, sampling: Sampling, prompts: Sequence[Prompt], step: int, weights: str, version: int
    ) -> TrackSpec:
        track = self.tracks[name]
        [size] = sizes_of(prompts)
        sampling = sampling if size is None else sampling.at_size(*size)
        return TrackSpec(
            parent=track.parent,
            branch=1 if track.parent is None else sampling.samples_per_prompt,
            sampling=track.facts.pinned(sampling, step),
            weights=weights,
            weight_version=version,
        )

    def _request(
        self, prompts: Sequence[Prompt], specs: dict[str, TrackSpec], step: int, purpose: Purpose
    ) -> RolloutReq:
        groups = [prompt.group_id for prompt in prompts]
        root = next(iter(specs.values()))
        return RolloutReq(
            sample_ids=groups,
            group_ids=groups,
            primitives=self.primitives(prompts),
            metadata=[dict(prompt.metadata) for prompt in prompts],
            places=[prompt.place for prompt in prompts],
            tracks=specs,
            purpose=purpose,
            step=step,
        ).expand(root.sampling.samples_per_prompt)


def check_versions(req: RolloutReq, resp: RolloutResp) -> None:
    """Check that all samples come from the weights that the request asked for. Raises SyncError (10002)."""
    for name, spec in req.tracks.items():
        versions = sorted(set(resp.tracks[name].weight_version.tolist()))
        if versions != [spec.weight_version]:
            raise SyncError(
                f"the samples of track {name} should come from weights after {spec.weight_version} updates, and they "
                f"say that they come from those after {', '.join(map(str, versions))}: the engine did not take over "
                "the last sync"
            )
