"""Samples that exist already take the place of drawn ones: for losses that learn from a data set."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from unirl.config.errors import UnreadableFileError
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.rollout.engine.trainside.engine import TrainedWeights, TrainsideRolloutEngine
from unirl.types.primitives import Images, MediaRef, MediaRefs
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
        return self.recorder.record(req, read_images(named.refs, params.height, params.width))


MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""How PIL calls pictures of 8 bits a channel."""


def read_images(refs: Sequence[MediaRef], height: int, width: int) -> Images:
    """One picture per reference, in their order. Raises DataError (4003)."""
    with ThreadPoolExecutor() as threads:  # decoders of picture files leave Python's lock
        pixels = list(threads.map(partial(read_image, height=height, width=width), (ref.uri for ref in refs)))
    return Images(pixels=torch.stack(pixels))


def read_image(path: str, height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1], on the 256 levels: scaled down to cover the size (Lanczos), and the middle of that.

    Raises:
        DataError: 4003 where the file is no picture, is cut, is transparent, or would have to be enlarged.
    """
    picture = _opaque(_opened(path), path)
    if picture.height < height or picture.width < width:
        raise UnreadableFileError(
            f"{path} has {picture.width} x {picture.height} pixels, and sampling.width x height = {width} x {height} "
            "would enlarge it. Lower sampling.height and sampling.width, or give larger pictures"
        )
    fitted = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous().float().div_(255)


def _opened(path: str) -> Image.Image:
    """The picture with all its pixels read, the right way up."""
    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as PIL meets the damage
        raise UnreadableFileError(f"{path} cannot be read as a picture: {error}") from error


def _opaque(picture: Image.Image, path: str) -> Image.Image:
    """As RGB."""
    if picture.mode not in MODES:
        raise UnreadableFileError(
            f"{path} is a picture of mode {picture.mode}; save it with 8 bits a channel as one of {', '.join(MODES)}"
        )
    if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise UnreadableFileError(f"{path} has transparent parts, and what shows through is not known; flatten it")
    return picture.convert("RGB")
