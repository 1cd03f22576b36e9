"""Pictures and videos in [0, 1] as they travel: raw or in a file that loses nothing, or, if asked for, as JPEG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unirl.config.extras import need
from unirl.reward.client.wire import ImageFormat, MediaPayload

# Method 0 is the fastest; exact keeps nothing hidden, as there is no alpha.
SAVE: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    "webp": {"format": "WEBP", "lossless": True, "method": 0, "quality": 0},
    "jpeg": {"format": "JPEG", "subsampling": 0},
}


def levels(pixels: Tensor) -> NDArray[np.uint8]:
    """[..., H, W, 3] of pixels [..., 3, H, W] in [0, 1]; a rollout's own pixels are levels already."""
    planes = (pixels * 255).round_().clamp_(0, 255).to(torch.uint8).movedim(-3, 0)
    return np.stack(list(planes.cpu().numpy()), axis=-1)


def image_medium(pixels: Tensor, format: ImageFormat, quality: int) -> MediaPayload:
    """One picture [3, H, W]; `quality` 1 to 95 is of JPEG alone."""
    picture = levels(pixels)
    if format == "raw":
        return _raw(picture)
    file = io.BytesIO()
    options = SAVE[format] | ({"quality": quality} if format == "jpeg" else {})
    Image.fromarray(picture).save(file, **options)
    return MediaPayload(format=format, data=file.getvalue())


def video_medium(frames: Tensor, format: str, fps: int) -> MediaPayload:
    """One video [F, 3, H, W]; as MP4 without loss (H.264 in RGB).

    Raises:
        DependencyError: MP4 needs PyAV.
    """
    pictures = levels(frames)
    return _raw(pictures) if format == "raw" else MediaPayload(format="mp4", data=_mp4(pictures, fps))


def _raw(picture: NDArray[np.uint8]) -> MediaPayload:
    return MediaPayload(format="raw", data=picture.tobytes(), shape=picture.shape)


def _mp4(pictures: NDArray[np.uint8], fps: int) -> bytes:
    need("av", by="video_format=mp4", install="pip install av, or write video_format: raw")
    import av

    file = io.BytesIO()
    with av.open(file, mode="w", format="mp4") as container:
        stream: Any = container.add_stream("libx264rgb", rate=fps, options={"qp": "0", "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "rgb24"
        frames = [av.VideoFrame.from_ndarray(picture, format="rgb24") for picture in pictures]
        for frame in [*frames, None]:
            container.mux(stream.encode(frame))
    return file.getvalue()
