"""Samples with the trained weights themselves: there is no second copy, and nothing to synchronise."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import ClassVar, Protocol

import torch

from unirl.models.base import Pipeline
from unirl.rollout.engine.base import RolloutEngine
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities, WeightSource
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


class TrainedWeights(WeightSource, Protocol):
    """The part of a train backend that the engine uses."""

    updates: int


class TrainsideRolloutEngine(RolloutEngine):
    """Samples with the trained pipeline, `forward_batch_size` rows per forward."""

    capabilities: ClassVar[Capabilities] = Capabilities(behaviour_logp=True, snapshots=True)
    toy: ClassVar[Mapping[str, object]] = {"forward_batch_size": 8}

    def __init__(self, pipeline: Pipeline, backend: TrainedWeights, *, forward_batch_size: int = 8) -> None:
        """
        Args:
            forward_batch_size: rows per forward. It changes speed and memory, but no bit of a sample.
        """
        if forward_batch_size < 1:
            raise ValueError(f"rollout.forward_batch_size must be >= 1, got {forward_batch_size}")
        self.pipeline = pipeline
        self.backend = backend
        self.forward_batch_size = forward_batch_size

    def generate(self, req: RolloutReq) -> RolloutResp:
        """Sample from the live weights, or from the snapshot that the request names."""
        with torch.no_grad():
            named = nullcontext() if req.weights == "live" else self.backend.weights(req.weights)
            with named, self.backend.sampling():
                resp = self.pipeline.generate(req, self.forward_batch_size)
        version = self.backend.updates
        return RolloutResp(
            {
                name: track.replace(weight_version=torch.full((len(track),), version, dtype=torch.int64))
                for name, track in resp.tracks.items()
            }
        )

    def facts(self) -> ModelFacts:
        """The trained model's facts."""
        return self.pipeline.facts
