"""The decoder returns the pixels of valid media and an error for all others, within its memory limit."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from reward_service.config import LimitsConfig
from reward_service.decoder import DecodeLimits, decode
from reward_service.faults import damaged, image_file, media, noise, video_file
from reward_service.frames import DecodeMedia
from reward_service.media import BadMedia, MediaDecoder, decode_limits
from reward_service.metrics import Metrics

from unirl.media.files import UnreadableMedia, read_below
from unirl.reward.client.wire import MediaPayload, Turn

from .conftest import a_picture

LIMITS = msgspec.json.decode(decode_limits(LimitsConfig()), type=DecodeLimits)


def limits(**changes) -> DecodeLimits:
    return msgspec.structs.replace(LIMITS, **changes)


def picture_of(data: bytes, format: str | None = None, **changes) -> np.ndarray:
    payload = MediaPayload(format=format, data=data) if format else None
    asked = DecodeMedia("image", payload, None if format else b64(data))
    return array_of(decode(asked, limits(**changes)))


def array_of(medium: MediaPayload) -> np.ndarray:
    assert medium.format == "raw"
    return np.frombuffer(medium.data, np.uint8).reshape(medium.shape)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(("format", "options"), [("png", {}), ("webp", {"lossless": True})])
def test_a_lossless_file_gives_its_exact_pixels(format, options):
    picture = a_picture()
    assert np.array_equal(picture_of(image_file(picture, format, **options), format), picture)
    assert np.array_equal(picture_of(image_file(picture, format, **options)), picture)


def test_a_jpeg_gives_what_its_library_gives():
    data = image_file(a_picture(), "jpeg", quality=90)
    assert np.array_equal(picture_of(data, "jpeg"), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA"])
def test_a_mode_that_rgb_can_hold_is_taken(mode):
    picture = Image.fromarray(a_picture()).convert(mode)
    file = io.BytesIO()
    picture.save(file, "PNG")
    assert np.array_equal(picture_of(file.getvalue()), np.asarray(picture.convert("RGB")))


def transparent() -> bytes:
    picture = Image.fromarray(a_picture()).convert("RGBA")
    picture.putalpha(7)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def animated(format: str) -> bytes:
    file = io.BytesIO()
    first, second = (Image.fromarray(a_picture(seed)) for seed in (0, 1))
    first.save(file, format, save_all=True, append_images=[second])
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return image_file(a_picture(), "jpeg", exif=exif)


def bomb(side: int) -> bytes:
    """A PNG whose header promises side x side pixels and whose body is small."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A PNG with a text chunk that unpacks to 100 MB."""
    plain = image_file(a_picture(), "png")
    body = b"Comment\0\0" + zlib.compress(bytes(100_000_000), 9)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    return plain[:33] + chunk + plain[33:]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not begin as"),
        (b"GIF89a" + bytes(50), "does not begin as"),
        (image_file(a_picture(), "bmp"), "does not begin as"),
        (image_file(a_picture(), "tiff"), "does not begin as"),
        (image_file(a_picture(), "png")[:300], "truncated|cut|broken|Truncated"),
        (image_file(a_picture(), "jpeg")[:300], "Truncated|truncated|cut|broken"),
        (transparent(), "mode RGBA"),
        (animated("png"), "animation of 2 frames"),
        (animated("webp"), "animation of 2 frames"),
        (turned(), "EXIF orientation"),
        (bomb(60_000), "too many pixels"),
        (bomb(4097), "4097 x 4097 pixels"),
        (bomb(4096), "truncated|broken|cut|not enough"),
        (text_bomb(), "too large|limit|Decompressed"),
    ],
)
def test_an_image_that_is_not_single_upright_and_rgb_is_refused(data, said):
    with pytest.raises(Exception, match=said) as raised:
        picture_of(data)
    assert isinstance(raised.value, (UnreadableMedia, OSError, ValueError, SyntaxError))


def test_a_file_of_another_format_than_it_says_is_refused():
    with pytest.raises(UnreadableMedia, match="does not begin as a WEBP"):
        picture_of(image_file(a_picture(), "png"), "webp")


def test_a_file_that_is_too_large_is_refused():
    with pytest.raises(UnreadableMedia, match="at most 100 are read"):
        picture_of(image_file(a_picture(), "png"), file_bytes=100)


def frames(count: int = 5, height: int = 24, width: int = 34) -> np.ndarray:
    return noise((count, height, width, 3))


def test_a_lossless_video_gives_its_exact_frames():
    data = video_file(frames())
    assert np.array_equal(array_of(decode(DecodeMedia("video", base64=b64(data)), LIMITS)), frames())


def test_a_webm_is_read_and_its_frames_counted():
    data = video_file(frames(7), "webm", "libvpx-vp9")
    assert decode(DecodeMedia("video", MediaPayload(format="webm", data=data)), LIMITS).shape == (7, 24, 34, 3)


PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        (PLAYLIST, {}, "neither an MP4 nor a WebM"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "neither an MP4 nor a WebM"),
        (video_file(frames()), {"frames": 4}, "at most 4 frames"),
        (video_file(frames()), {"video_pixels": 24 * 34 * 3}, "pixels in all"),
        (video_file(frames()), {"side": 30}, "34 x 24 pixels"),
        (video_file(frames(20), fps=1), {"video_s": 10.0}, "longer than 10 s"),
        (video_file(frames())[:400], {}, "Invalid data|moov|end of file|End of file|unknown"),
    ],
)
def test_a_video_beyond_the_limits_is_refused(data, changes, said):
    with pytest.raises(Exception, match=said):
        decode(DecodeMedia("video", base64=b64(data)), limits(**changes))


def test_a_playlist_declared_as_mp4_opens_no_file():
    with pytest.raises(Exception, match=r"Invalid data|moov|(?i:end of file)"):
        decode(DecodeMedia("video", MediaPayload(format="mp4", data=PLAYLIST)), LIMITS)


@pytest.fixture
def roots(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (root / "a.mp4").write_bytes(b"inside")
    (root / "sub" / "b.mp4").write_bytes(b"below")
    (outside / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(outside / "secret")
    (root / "dirlink").symlink_to(outside)
    os.mkfifo(root / "fifo")
    return root


def test_paths_below_a_root_are_read(roots):
    below = partial(read_below, roots=[str(roots)], max_bytes=100)
    assert below("a.mp4") == below(str(roots / "a.mp4")) == b"inside"
    assert below("sub/../sub/b.mp4") == b"below"


ESCAPES = [
    "../outside/secret",
    "sub/../../outside/secret",
    "link",
    "dirlink/secret",
    "/etc/passwd",
    "/dev/zero",
    "/proc/self/environ",
    "file:///etc/passwd",
    "http://169.254.169.254/latest",
    "fifo",
    "sub",
    "",
    ".",
    "missing.mp4",
    "a.mp4\0.png",
    "~/a.mp4",
    "x" * 5000,
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_other_path_is_read_and_all_refusals_are_alike(roots, path):
    with pytest.raises(
        UnreadableMedia, match=r"^video_path names no file below the service's media roots that may be read$"
    ):
        read_below(path, [str(roots)], 100)


def test_without_roots_no_path_is_read(roots):
    with pytest.raises(UnreadableMedia):
        read_below(str(roots / "a.mp4"), [], 100)


def in_decoder(config: LimitsConfig, work):
    """Run `work(decoder)` with decoder processes."""

    async def run():
        decoder = MediaDecoder(config, Metrics())
        try:
            return await work(decoder)
        finally:
            await decoder.close()

    return asyncio.run(run())


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def test_hundreds_of_damaged_files_crash_no_decoder_and_leave_it_small():
    rng = random.Random(5)

    async def work(decoder: MediaDecoder):
        good = refused = 0
        for _ in range(400):
            modality, data = rng.choice(files)
            field = {"image": "image_b64", "video": "video_b64"}[modality]
            try:
                await decoder.raw(Turn(**{field: b64(damaged(data, rng))}))
                good += 1
            except BadMedia:
                refused += 1
        return good, refused, decoder.pids, [peak_mb(pid) for pid in decoder.pids], decoder

    files = media()
    good, refused, pids, peaks, _ = in_decoder(LimitsConfig(num_decoders=1), work)
    assert (good + refused, len(pids)) == (400, 1)
    assert good > 0 and refused > 200
    assert max(peaks) < 300


def test_an_image_that_takes_too_long_is_refused_and_the_next_one_is_decoded(monkeypatch):
    monkeypatch.setattr("reward_service.media.PATIENCE", 6000.0)  # else the service gives up first on a busy machine
    large = image_file(np.tile(a_picture(height=64, width=64), (64, 64, 1)), "jpeg", quality=95)

    async def work(decoder: MediaDecoder):
        await decoder.start()
        (before,) = decoder.pids
        with pytest.raises(BadMedia, match=r"takes more than 0\.1 s to decode"):
            await decoder.raw(Turn(image_b64=b64(large)))
        image, _ = await decoder.raw(Turn(image_b64=b64(image_file(a_picture(), "png"))))
        return before, decoder.pids, image

    before, after, image = in_decoder(LimitsConfig(num_decoders=1, decode_s=0.1), work)
    assert image is not None and np.array_equal(array_of(image), a_picture())
    assert len(after) == 1 and after != [before]


def test_memory_beyond_the_cap_is_a_refusal():
    large = image_file(np.zeros((4096, 4096, 3), np.uint8), "png")

    async def work(decoder: MediaDecoder):
        with pytest.raises(BadMedia, match=r"needs more than the|ended"):
            await decoder.raw(Turn(image_b64=b64(large)))

    in_decoder(replace(LimitsConfig(), num_decoders=1, decoder_mb=150.0), work)


def test_a_request_that_is_cancelled_costs_no_decoder():
    large = image_file(np.zeros((4096, 4096, 3), np.uint8), "png")

    async def work(decoder: MediaDecoder):
        await decoder.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decoder.raw(Turn(image_b64=b64(large))), 0.01)
        return await decoder.raw(Turn(image_b64=b64(image_file(a_picture(), "png"))))

    image, _ = in_decoder(LimitsConfig(num_decoders=1), work)
    assert np.array_equal(array_of(image), a_picture())


def test_raw_media_have_the_same_limits():
    async def work(decoder: MediaDecoder):
        with pytest.raises(BadMedia, match="5000 x 1 pixels"):
            await decoder.raw(Turn(image=MediaPayload(format="raw", data=bytes(15000), shape=(1, 5000, 3))))
        with pytest.raises(BadMedia, match="300 frames"):
            await decoder.raw(Turn(video=MediaPayload(format="raw", data=bytes(900), shape=(300, 1, 1, 3))))
        return decoder.pids

    assert in_decoder(LimitsConfig(), work) == []


def test_the_decoder_loads_neither_torch_nor_transformers():
    script = (
        "import sys, av, reward_service.decoder; assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
