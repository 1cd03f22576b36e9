"""A trainer and an engine of latents whose weights live in a server, for the tests of such engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests import sync_ends
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.testing.bundle import request_of
from unirl.train.configs import LoraConfig
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

TOY = {"path": "toy", "dtype": "fp32"}
PROMPTS = ("a red circle", "two cats", "a house in the fog")
SD3 = (SD3Bundle, SD3Pipeline)


class Served(sync_ends.Served):
    """A trainer and an engine of latents whose weights live in a server."""

    @classmethod
    def at(
        cls,
        kind: Any,
        folder: Path,
        lora: LoraConfig | None = None,
        program: str = "fake",
        family: Any = SD3,
        **keys: Any,
    ) -> Served:
        """An engine of the class `kind`, whose server is started when weights are sent."""
        bundle, pipeline = family
        merge = keys.pop("merge_adapters", False)
        engine = kind(pipeline(bundle(**TOY, meta_init=True)), folder, program=program, **keys)
        return cls.joining(pipeline(bundle(**TOY)), engine, lora, merge_adapters=merge)

    def asking(self, **changes: object) -> RolloutReq:
        return asking(self.engine, **changes).from_weights("live", self.backend.updates)

    def sampled(self, req: RolloutReq) -> LatentSegment:
        segment = self.engine.generate(req).tracks["image"].segment
        assert isinstance(segment, LatentSegment)
        return segment

    def log_prob_gap(self, req: RolloutReq) -> float:
        """The largest difference between the engine's log-probs and the trainer's replay."""
        track = self.engine.generate(req).tracks["image"].sampled_as(LatentSegment)
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
        return float((track.segment.logp - replay.logp).abs().max())


def asking(engine: Any, **changes: object) -> RolloutReq:
    """A training request for three prompts with two samples each, of four steps with noise in the first two."""
    values: dict[str, Any] = {"kernel": FlowSDEStrategy(), "num_inference_steps": 4, "height": 32, "width": 32}
    values |= {"samples_per_prompt": 2, "sde_indices": (0, 1), "max_sequence_length": 16, **changes}
    params = DiffusionSamplingParams(**values)
    facts = engine.facts()
    levels = facts.schedule.sigmas(params.num_inference_steps, facts.image_seq_len(params))
    pinned = params.pinned(0, levels.tolist())
    return request_of(PROMPTS, "image", pinned).expand(params.samples_per_prompt)


@contextmanager
def serving(kind: Any, folder: Path, **keys: object) -> Iterator[Served]:
    """A trainer and an engine of the class `kind` whose server ends with the block."""
    served = Served.at(kind, folder, **keys)
    try:
        yield served
    finally:
        served.engine.server.stop()
