"""Requests to an engine. They contain every decision, so that two engines given one request do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from unirl.config.errors import SyncError
from unirl.data.data_source import sizes_of
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.distributed.weight_sync.base import SyncReport
from unirl.types.batch import Batch
from unirl.types.facts import ModelFacts
from unirl.types.primitives import PromptImages, Texts
from unirl.types.rollout_req import Purpose, RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import SamplingT


@dataclass(frozen=True, kw_only=True)
class RequestMaker(Generic[SamplingT]):
    """Makes the requests of one domain: P prompts of one size become P x N samples of one track."""

    track: str
    facts: ModelFacts
    sampling: SamplingT
    """Settings of training samples."""
    eval_sampling: SamplingT
    """Settings of evaluation samples."""
    eval_weights: str
    """The weights that evaluation samples from: `live`, or a snapshot."""
    pin: Callable[[SamplingT, int], SamplingT]
    """`Trainer.pinned` of the domain: (settings, step) to the settings that the request of that step carries."""

    def training(self, prompts: Sequence[Prompt], step: int, published: SyncReport) -> RolloutReq:
        """A request of one training step, for the weights that were pushed.

        If the prompts have recorded samples, the request is for these instead of new ones.
        """
        req = self._request(prompts, self.sampling, step, "r", published.weights, published.version)
        recorded = [ref for prompt in prompts for ref in prompt.recorded]
        return req.with_recorded(recorded) if recorded else req

    def evaluation(self, prompts: Sequence[Prompt], version: int) -> RolloutReq:
        """A request for held-out prompts. Its randomness does not depend on the step.

        Args:
            version: optimizer updates behind the weights that are evaluated.
        """
        return self._request(prompts, self.eval_sampling, 0, "eval", self.eval_weights, version)

    def primitives(self, prompts: Sequence[Prompt]) -> dict[str, Batch]:
        """The text of each prompt, and its images if any of the prompts has images.

        Raises:
            DataError: a prompt has fewer or more images than the model takes.
        """
        check_counts(prompts, self.facts)
        primitives: dict[str, Batch] = {"text": Texts(texts=[prompt.text for prompt in prompts])}
        if any(prompt.images for prompt in prompts):
            primitives["images"] = PromptImages(per_prompt=[prompt.images for prompt in prompts])
        return primitives

    def _request(
        self, prompts: Sequence[Prompt], sampling: SamplingT, step: int, purpose: Purpose, weights: str, version: int
    ) -> RolloutReq:
        groups = [prompt.group_id for prompt in prompts]
        [size] = sizes_of(prompts)
        sampling = sampling if size is None else sampling.at_size(*size)
        return RolloutReq(
            sample_ids=groups,
            group_ids=groups,
            primitives=self.primitives(prompts),
            metadata=[dict(prompt.metadata) for prompt in prompts],
            tracks={self.track: TrackSpec(sampling=self.pin(sampling, step))},
            purpose=purpose,
            step=step,
            weights=weights,
            weight_version=version,
        ).expand(sampling.samples_per_prompt)


def check_version(req: RolloutReq, track: RolloutTrack) -> None:
    """Check that the samples come from the weights that the request asked for. Raises SyncError (10002)."""
    versions = sorted(set(track.weight_version.tolist()))
    if versions != [req.weight_version]:
        raise SyncError(
            f"the rollout should come from weights after {req.weight_version} updates, and its samples say that "
            f"they come from those after {', '.join(map(str, versions))}: the engine did not take over the last sync"
        )
