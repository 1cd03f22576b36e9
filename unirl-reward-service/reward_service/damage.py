"""Media that were damaged, for those who test what reads media."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

EXTREMES = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\xff\xff", bytes(4))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file with up to 12 changes: bytes changed, sizes made extreme, pieces cut out, doubled, or cut off."""
    body = bytearray(data)
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(body) or 1)
        match rng.randrange(6):
            case 0:
                body[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                body[at : at + 4] = rng.choice(
                    [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\xff\xff", bytes(4)]
                )
            case 2:
                del body[at : at + rng.randrange(64)]
            case 3:
                body[at:at] = body[at : at + rng.randrange(64)]
            case 4:
                body[at : at + 1] = bytes([(body[at] if body else 0) ^ (1 << rng.randrange(8))])
            case 5:
                del body[at + rng.randrange(2000) :]
    return bytes(body)


def media(side: int = 32) -> list[tuple[str, bytes]]:
    """(`image` or `video`, file) of every format that the service reads."""
    picture = noise((side, side + 8, 3))
    images: Sequence[tuple[str, dict[str, Any]]] = [
        ("png", {}),
        ("jpeg", {}),
        ("jpeg", {"progressive": True}),
        ("webp", {}),
        ("webp", {"lossless": True}),
    ]
    files = [("image", image_file(picture, format, **options)) for format, options in images]
    frames = noise((5, side, side + 2, 3))
    return [*files, ("video", video_file(frames)), ("video", video_file(frames, "webm", "libvpx-vp9"))]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def image_file(picture: np.ndarray[Any, Any], format: str, **options: Any) -> bytes:
    """[H, W, 3] uint8 as a file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format=format, **options)
    return file.getvalue()


def video_file(frames: np.ndarray[Any, Any], format: str = "mp4", codec: str = "libx264rgb", fps: int = 8) -> bytes:
    """[F, H, W, 3] uint8 as a file; without loss by the codec libx264rgb."""
    import av

    file = io.BytesIO()
    lossless = codec == "libx264rgb"
    with av.open(file, mode="w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=fps, options={"qp": "0"} if lossless else {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        for frame in [*(av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in frames), None]:
            container.mux(stream.encode(frame))
    return file.getvalue()
