"""Encodes images and videos for requests: raw pixels, a lossless file, or, on request, JPEG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unirl.config.dependencies import need
from unirl.reward.client.wire import ImageFormat, MediaPayload
from unirl.types.primitives import levels_of

# WebP method 0 is the fastest. `exact` is not needed, since there is no alpha channel.
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    "webp": {"format": "WEBP", "lossless": True, "method": 0, "quality": 0},
    "jpeg": {"format": "JPEG", "subsampling": 0},
}


def uint8_levels(pixels: Tensor) -> NDArray[np.uint8]:
    """Returns [..., H, W, 3] of pixels [..., 3, H, W], in [0, 1] or uint8. Rounding changes no pixel of a rollout."""
    planes = levels_of(pixels).movedim(-3, 0)
    return np.stack(list(planes.cpu().numpy()), axis=-1)


def encode_image(pixels: Tensor, format: ImageFormat, quality: int) -> MediaPayload:
    """Returns the payload of an image [3, H, W]. Only JPEG uses `quality`, 1 to 95."""
    levels = uint8_levels(pixels)
    if format == "raw":
        return _raw(levels)
    from PIL import Image

    file = io.BytesIO()
    options = SAVE_OPTIONS[format] | ({"quality": quality} if format == "jpeg" else {})
    Image.fromarray(levels).save(file, **options)
    return MediaPayload(format=format, data=file.getvalue())


def encode_video(frames: Tensor, format: str, fps: int) -> MediaPayload:
    """Returns the payload of a video [F, 3, H, W]. MP4 is lossless (H.264 in RGB) and needs PyAV."""
    levels = uint8_levels(frames)
    if format == "raw":
        return _raw(levels)
    need("av", by="video_format=mp4", install="pip install av, or write video_format: raw")
    import av

    file = io.BytesIO()
    with av.open(file, mode="w", format="mp4") as container:
        stream: Any = container.add_stream("libx264rgb", rate=fps, options={"qp": "0", "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = *levels.shape[1:3], "rgb24"
        video_frames = [av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in levels]
        for frame in [*video_frames, None]:
            container.mux(stream.encode(frame))
    return MediaPayload(format="mp4", data=file.getvalue())


def _raw(levels: NDArray[np.uint8]) -> MediaPayload:
    return MediaPayload(format="raw", data=levels.tobytes(), shape=levels.shape)
