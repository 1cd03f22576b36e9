"""The pool of decoder processes, which turn the images and videos of clients into raw pixels."""

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
"""A decoder counts as stuck after this many times the allowed CPU time, in wall-clock time."""


class BadMedia(ValueError):
    """An image or video cannot be decoded; the message gives the reason."""


class MediaDecoder:
    """A few decoder processes. A process that dies or is late is replaced before the next use."""

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
        """Returns the raw image and the raw video of a turn.

        Raises:
            BadMedia: it is damaged or too large, or may not be read.
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

    async def _decoded(self, message: DecodeMedia) -> MediaPayload:
        seconds = self._limits.decode_s * (VIDEO_TIME if message.modality == "video" else 1)
        child = await self._idle.get()
        answered = False
        try:
            child = child or await self._start()
            answer = await child.ask(message, seconds * PATIENCE)
            answered = True
        except (TimeoutError, PeerGone) as error:
            assert child is not None
            raise BadMedia(await self._why(child, error, seconds)) from error
        finally:
            # A process that has not answered, also after a cancelled request, is not used again.
            self._idle.put_nowait(child if answered else None)
            if child is not None and not answered:
                await self._end(child)
        assert isinstance(answer, DecodedMedia)
        if answer.medium is None:
            raise BadMedia(answer.error or "cannot be decoded")
        check_raw(answer.medium, self._limits)
        return answer.medium

    async def _why(self, child: Child, error: Exception, seconds: float) -> str:
        if isinstance(error, TimeoutError):
            return f"cannot be decoded: its decoder did not answer within {seconds * PATIENCE:g} s"
        death = await child.describe_end()
        return f"takes more than {seconds:g} s to decode" if "SIGPROF" in death else f"its decoder {death}"

    async def _end(self, child: Child) -> None:
        """Ends a decoder. The next use starts another one."""
        self._metrics.restarts.labels("decoder", "died").inc()
        self._children.discard(child)
        await child.kill()

    async def start(self) -> None:
        """Starts all decoders."""
        for _ in range(self._idle.qsize()):
            self._idle.put_nowait(self._idle.get_nowait() or await self._start())

    async def _start(self) -> Child:
        command = [sys.executable, "-m", "reward_service.decoder", decode_limits(self._limits)]
        # The stacks of library threads would take up the limited address space.
        child = await Child.start(command, {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        self._children.add(child)
        return child

    async def close(self) -> None:
        """Ends all decoders."""
        await asyncio.gather(*(child.kill() for child in self._children))


def decode_limits(limits: LimitsConfig) -> str:
    """Returns the limits as a decoder's command line argument."""
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
    """Raises BadMedia when raw pixels exceed the limits."""
    shape: Sequence[int] = medium.shape or ()
    frames, height, width = shape[0] if len(shape) == 4 else 1, shape[-3], shape[-2]
    if max(height, width) > limits.side or height * width > limits.pixels:
        raise BadMedia(f"{width} x {height} pixels: at most {limits.pixels}, and {limits.side} along a side, are taken")
    if len(shape) == 4 and (frames > limits.frames or frames * height * width > limits.video_pixels):
        raise BadMedia(
            f"{frames} frames of {width} x {height}: at most {limits.frames}, and {limits.video_pixels} pixels in all"
        )
