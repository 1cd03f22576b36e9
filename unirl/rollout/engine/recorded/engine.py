"""Samples that exist already take the place of drawn ones: for losses that learn from a data set."""

from __future__ import annotations

from typing import Any, ClassVar

from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.rollout.engine.recorded.pictures import read_pictures
from unirl.rollout.engine.trainside.engine import TrainedWeights, TrainsideRolloutEngine
from unirl.types.primitives import MediaRefs
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RECORDED, RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams


class RecordedRolloutEngine(TrainsideRolloutEngine):
    """Gives back the pictures that a request names, as latents without a trajectory.

    A request that names none is drawn from the trained weights, as trainside does: those of evaluations.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(snapshots=True, recorded=True, modalities=("image",))

    def __init__(
        self, pipeline: DiffusionPipeline[Any], backend: TrainedWeights, *, forward_batch_size: int = 8
    ) -> None:
        """
        Args:
            forward_batch_size: rows per forward where pictures are drawn; speed and memory, never a bit of a sample.
        """
        super().__init__(pipeline, backend, forward_batch_size=forward_batch_size)
        self.recorder = pipeline
        pipeline.bundle.encoder()  # a family without one is refused here, not in the first step

    def generate(self, req: RolloutReq) -> RolloutResp:
        """The recorded pictures, scaled and cropped to the size of the request; drawn ones where none are named.

        Raises:
            DataError: 4003 for a picture that cannot be read, or is smaller than was asked for.
        """
        if RECORDED not in req.primitives:
            return super().generate(req)
        named = req.primitives[RECORDED]
        assert isinstance(named, MediaRefs)
        _, params = req.only_track(DiffusionSamplingParams)
        return self.recorder.record(req, read_pictures(named.refs, params.height, params.width))
