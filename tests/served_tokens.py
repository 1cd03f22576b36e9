"""A trainer and an engine of tokens whose weights live in a server, for the tests of such engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests import sync_ends
from unirl.models.language.pipeline import TextPipeline
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.testing.language import text_params, text_request
from unirl.train.configs import LoraConfig
from unirl.types.rollout_req import RolloutReq
from unirl.types.segments import TextSegment

LORA = LoraConfig(rank=4, alpha=8.0)
ATOL = 2e-5
"""Largest difference of log-probs of two fp32 forwards over other batches."""
FAKE = {"program": "fake", "concurrency": 8}
"""The settings of an engine whose server has an environment of its own."""


def tiny_qwen3(**keys: Any) -> Qwen3Pipeline:
    return Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32", **keys))


class Served(sync_ends.Served):
    """A trainer and an engine of tokens whose weights live in a server."""

    @classmethod
    def at(
        cls,
        kind: Any,
        folder: Path,
        lora: LoraConfig | None = None,
        pipeline: Callable[..., TextPipeline[Any]] = tiny_qwen3,
        **keys: Any,
    ) -> Served:
        """An engine of the class `kind`, whose server is started when weights are sent."""
        return cls.joining(pipeline(), kind(pipeline(meta_init=True), folder, **keys), lora)

    def asking(self, **params: object) -> RolloutReq:
        """A training request for three prompts."""
        return text_request(3, text_params(**params)).from_weights("live", self.backend.updates)

    def sampled(self, req: RolloutReq) -> TextSegment:
        segment = self.engine.generate(req).tracks["text"].segment
        assert isinstance(segment, TextSegment)
        return segment

    def tokens(self, req: RolloutReq) -> list[list[int]]:
        segment = self.sampled(req)
        return [row.tolist() for row in segment.tokens.split(segment.lengths.tolist())]

    def log_prob_gap(self, req: RolloutReq) -> float:
        """The largest difference between the engine's log-probs and the trainer's replay."""
        track = self.engine.generate(req).tracks["text"].sampled_as(TextSegment)
        with torch.no_grad():
            replay = self.trained.stage.replay(track.conditions, track.segment)
        return float((track.segment.logp - replay.logp).abs().max())


@contextmanager
def serving(kind: Any, folder: Path, **keys: Any) -> Iterator[Served]:
    """A trainer and an engine of the class `kind` whose server ends with the block."""
    served = Served.at(kind, folder, **keys)
    try:
        yield served
    finally:
        served.engine.server.stop()
