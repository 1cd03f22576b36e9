"""From what clients send to raw pixels, by processes that can be lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from reward_service.child import Child
from reward_service.config import MIB, LimitsConfig
from reward_service.decoder import VIDEO_TIME, DecodeLimits
from reward_service.frames import DecodedMedia, DecodeMedia, PeerGone
from reward_service.metrics import Metrics
from unirl.reward.client.wire import MediaPayload, Turn

PATIENCE = 10
"""A decoder is given this many times the CPU time of its medium before it counts as stuck."""


class BadMedia(ValueError):
    """A medium cannot be had; the message says why."""


class MediaDecoder:
    """A few decoder processes; one that is lost or late is replaced before the next medium."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._idle: asyncio.Queue[Child | None] = asyncio.Queue()
        self._children: set[Child] = set()
        for _ in range(limits.num_decoders):
            self._idle.put_nowait(None)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def raw(self, turn: Turn) -> tuple[MediaPayload | None, MediaPayload | None]:
        """The image and the video of a turn, raw.

        Raises:
            BadMedia: it is damaged, too large, or may not be read.
        """
        if turn.has_image:
            return await self._raw("image", turn.image, turn.image_b64, None), None
        if turn.has_video:
            return None, await self._raw("video", turn.video, turn.video_b64, turn.video_path)
        return None, None

    async def _raw(
        self, modality: str, medium: MediaPayload | None, base64: str | None, path: str | None
    ) -> MediaPayload:
        if medium is not None and medium.format == "raw":
            check_raw(medium, self._limits)
            return medium
        return await self._decoded(DecodeMedia(modality, medium, base64, path))

    async def _decoded(self, asked: DecodeMedia) -> MediaPayload:
        seconds = self._limits.decode_s * (VIDEO_TIME if asked.modality == "video" else 1)
        child = await self._idle.get()
        answered = False
        try:
            child = child or await self._start()
            answer = await child.ask(asked, seconds * PATIENCE)
            answered = True
        except (TimeoutError, PeerGone) as error:
            assert child is not None
            raise BadMedia(await self._why(child, error, seconds)) from error
        finally:
            # One that has not answered, because its request was cancelled too, is asked no more.
            self._idle.put_nowait(child if answered else None)
            if child is not None and not answered:
                await self._end(child)
        assert isinstance(answer, DecodedMedia)
        if answer.medium is None:
            raise BadMedia(answer.problem or "cannot be decoded")
        check_raw(answer.medium, self._limits)
        return answer.medium

    async def _why(self, child: Child, error: Exception, seconds: float) -> str:
        if isinstance(error, TimeoutError):
            return f"cannot be decoded: its decoder did not answer within {seconds * PATIENCE:g} s"
        death = await child.death()
        return f"takes more than {seconds:g} s to decode" if "SIGPROF" in death else f"its decoder {death}"

    async def _end(self, child: Child) -> None:
        """End a decoder; the next medium starts another."""
        self._metrics.restarts.labels("decoder", "died").inc()
        self._children.discard(child)
        await child.kill()

    async def start(self) -> None:
        """Have every decoder ready before the first medium comes."""
        for _ in range(self._idle.qsize()):
            self._idle.put_nowait(self._idle.get_nowait() or await self._start())

    async def _start(self) -> Child:
        command = [sys.executable, "-m", "reward_service.decoder", decode_limits(self._limits)]
        # A library that decodes must not bring threads whose stacks fill the address space.
        child = await Child.start(command, {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        self._children.add(child)
        return child

    async def close(self) -> None:
        """End every decoder."""
        await asyncio.gather(*(child.kill() for child in self._children))


def decode_limits(limits: LimitsConfig) -> str:
    """The limits as a decoder's command line takes them."""
    return msgspec.json.encode(
        DecodeLimits(
            side=limits.side,
            pixels=limits.pixels,
            frames=limits.frames,
            video_pixels=limits.video_pixels,
            video_s=limits.video_s,
            decode_s=limits.decode_s,
            file_bytes=int(limits.file_mb * MIB),
            address_space=int(limits.decoder_mb * MIB),
            media_roots=list(limits.media_roots),
        )
    ).decode()


def check_raw(medium: MediaPayload, limits: LimitsConfig) -> None:
    """Raises BadMedia when a raw medium is larger than the limits."""
    shape: Sequence[int] = medium.shape or ()
    frames, height, width = shape[0] if len(shape) == 4 else 1, shape[-3], shape[-2]
    if max(height, width) > limits.side or height * width > limits.pixels:
        raise BadMedia(f"{width} x {height} pixels: at most {limits.pixels}, and {limits.side} along a side, are taken")
    if len(shape) == 4 and (frames > limits.frames or frames * height * width > limits.video_pixels):
        raise BadMedia(
            f"{frames} frames of {width} x {height}: at most {limits.frames}, and {limits.video_pixels} pixels in all"
        )
