"""Returns recorded images instead of sampling, for losses that learn from a data set."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import UnreadableFileError
from unirl.models.denoising.pipeline import LatentPipeline
from unirl.models.images import decode_file, fit_image, read_file
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.types.primitives import Images, MediaRef, MediaRefs
from unirl.types.protocols import Capabilities, WeightSource
from unirl.types.rollout_req import RECORDED, RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams


class RecordedRolloutEngine(TrainsideRolloutEngine):
    """Returns the images that a request names, as latents without a trajectory.

    A request without recorded images, as in evaluations, is sampled from the trained weights.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(snapshots=True, recorded=True, modalities=("image",))

    def __init__(
        self,
        pipeline: LatentPipeline[Any],
        backend: WeightSource,
        *,
        forward_batch_size: int = 8,
        gather_weights: bool = True,
    ) -> None:
        """
        Args:
            forward_batch_size: rows per forward when images are sampled. It changes speed and memory, not the samples.
            gather_weights: as in `TrainsideRolloutEngine`, when images are sampled.
        """
        super().__init__(pipeline, backend, forward_batch_size=forward_batch_size, gather_weights=gather_weights)
        self.recorder = pipeline
        pipeline.bundle.encoder()  # raises now, not in the first step, if the family has no image encoder

    def generate(self, req: RolloutReq) -> RolloutResp:
        """The recorded images, scaled and cropped to the size of the request. Sampled images if it names none.

        Raises:
            DataError: 4003 for an image that cannot be read, or is smaller than the request.
        """
        if RECORDED not in req.primitives:
            return super().generate(req)
        recorded = req.primitives[RECORDED]
        assert isinstance(recorded, MediaRefs)
        _, params = req.only_track(DiffusionSamplingParams)
        return self.recorder.record(req, read_images(recorded.refs, params.height, params.width))


def read_images(refs: Sequence[MediaRef], height: int, width: int) -> Images:
    """Read one image per reference, in order. Raises DataError (4003)."""
    with ThreadPoolExecutor() as threads:  # PIL decoders release Python's lock
        pixels = list(threads.map(partial(read_image, height=height, width=width), (ref.uri for ref in refs)))
    return Images.of(torch.stack(pixels))


def read_image(path: str, height: int, width: int) -> Tensor:
    """Read an image as [3, height, width] in [0, 1]: scaled down to cover the size (Lanczos), then centre-cropped.

    Raises:
        DataError: 4003 when the file is not an image, is truncated or transparent, or would have to be enlarged.
    """
    image = decode_file(read_file(path), opaque=True).image
    if image.height < height or image.width < width:
        raise UnreadableFileError(
            f"{path} has {image.width} x {image.height} pixels, and sampling.width x height = {width} x {height} "
            "would enlarge it. Lower sampling.height and sampling.width, or use larger images"
        )
    return fit_image(image, height, width)
