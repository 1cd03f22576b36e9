"""Samples with the trained weights themselves: there is no second copy, and nothing to synchronise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch

from unirl.models.base import Pipeline
from unirl.rollout.engine.base import RolloutEngine, RowsPerForward, checked_rows, rows_per_forward, sampled_from
from unirl.types.facts import ModelFacts
from unirl.types.protocols import Capabilities, WeightSource
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp


class TrainsideRolloutEngine(RolloutEngine):
    """Samples with the trained pipeline, `forward_batch_size` rows per forward."""

    capabilities: ClassVar[Capabilities] = Capabilities(old_logp="native", snapshots=True, tools=True)
    toy: ClassVar[Mapping[str, object]] = {"forward_batch_size": 8}

    def __init__(
        self,
        pipeline: Pipeline,
        backend: WeightSource,
        *,
        forward_batch_size: RowsPerForward = "auto",
        gather_weights: bool = True,
    ) -> None:
        """
        Args:
            forward_batch_size: rows per forward. It changes speed and memory, but no bit of a sample. The word "auto"
                takes 8; for tokens on a GPU, it takes as many slots as fit 24 GiB of keys and values, at most 256.
            gather_weights: true gathers sharded weights once per rollout, so every device needs memory for all of them.
                False gathers one block at a time in each forward, in step with the other devices. It changes no bit.
        """
        self.pipeline = pipeline
        self.backend = backend
        self.forward_batch_size = checked_rows(forward_batch_size)
        self.gather_weights = gather_weights

    def generate(self, req: RolloutReq) -> RolloutResp:
        """Sample from the live weights, or from the snapshot that the request names."""
        with torch.no_grad():
            named = nullcontext() if req.weights == "live" else self.backend.weights(req.weights)
            with named, self.backend.sampling(self.gather_weights):
                resp = self.pipeline.generate(req, rows_per_forward(self.forward_batch_size, self.pipeline, req))
        return sampled_from(self.backend.updates, resp)

    def facts(self) -> ModelFacts:
        return self.pipeline.facts

    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        return [self.pipeline.bundle.spell(row) for row in rows]
