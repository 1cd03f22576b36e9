"""The pool of decoder processes, which turn the images and videos of clients into raw pixels."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from reward_service.child import Child
from reward_service.config import MIB, LimitsConfig
from reward_service.decoder import VIDEO_TIME, DecodeLimits
from reward_service.fairness import FairSlots
from reward_service.frames import DecodedMedia, DecodeMedia, PeerGone
from reward_service.metrics import Metrics
from unirl.reward.client.wire import MediaPayload, Turn

log = logging.getLogger("reward_service")

PATIENCE = 10
"""A decoder counts as stuck after this many times the allowed CPU time, in wall-clock time."""


CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL))
"""Exit statuses of a process that ran into an error of its own code, unlike that of one that was killed."""


class MemoryCharge(Protocol):
    """The memory of one request of one client."""

    client: str

    def take(self, count: int) -> None:
        """Reserves `count` more bytes. Raises RequestRefused."""

    def give(self, count: int) -> None:
        """Releases `count` bytes."""


class BadMedia(ValueError):
    """An image or video cannot be decoded; the message gives the reason."""


class DecoderLost(RuntimeError):
    """A decoder ended or did not answer, for no reason of the image or video."""


class DecoderCrashed(DecoderLost):
    """A decoder ended by an error of its own code. If another decoder does the same, the media is the cause."""


class MediaDecoder:
    """A few decoder processes. A process that dies or is late is replaced before the next use."""

    def __init__(self, limits: LimitsConfig, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._slots = FairSlots(limits.num_decoders)
        self._idle: list[Child | None] = [None] * limits.num_decoders
        self._children: set[Child] = set()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def raw(
        self, turn: Turn, charge: MemoryCharge | None = None
    ) -> tuple[MediaPayload | None, MediaPayload | None]:
        """Returns the raw image and the raw video of a turn.

        Args:
            charge: the memory of the request, to which decoded pixels are charged before they are received.

        Raises:
            BadMedia: it is damaged or too large, or may not be read.
            DecoderLost: two decoders were lost, and the image or video is not known to be the cause.
            RequestRefused: the request may not hold so much memory.
        """
        if turn.has_image:
            return await self._raw(DecodeMedia("image", turn.image, turn.image_b64), charge), None
        if turn.has_video:
            return None, await self._raw(DecodeMedia("video", turn.video, turn.video_b64, turn.video_path), charge)
        return None, None

    async def _raw(self, message: DecodeMedia, charge: MemoryCharge | None) -> MediaPayload:
        if message.medium is not None and message.medium.format == "raw":
            check_raw(message.medium, self._limits)
            return message.medium
        try:
            return await self._decoded(message, charge, fresh=False)
        except DecoderLost as error:
            log.warning("%s; trying once more with another decoder", error)
        try:
            return await self._decoded(message, charge, fresh=True)
        except DecoderCrashed as error:
            raise BadMedia(str(error)) from error

    async def _decoded(self, message: DecodeMedia, charge: MemoryCharge | None, *, fresh: bool) -> MediaPayload:
        """Returns the pixels from one decoder, which is a new process if `fresh`."""
        async with self._slots.slot(charge.client if charge else ""):
            child = self._idle.pop()
            answered = False
            try:
                if child is None or fresh or child.ended.done():
                    old, child = child, None
                    await self._end(old)
                    child = await self._start()
                answer = await self._ask(child, message, charge)
                answered = True
            finally:
                # A process that has not answered, also after a cancelled request, is not used again.
                self._idle.append(child if answered else None)
                if not answered:
                    await self._end(child)
        if answer.medium is None:
            raise BadMedia(answer.error or "cannot be decoded")
        check_raw(answer.medium, self._limits)
        return answer.medium

    async def _ask(self, child: Child, message: DecodeMedia, charge: MemoryCharge | None) -> DecodedMedia:
        """Returns the answer of a decoder. Raises BadMedia, DecoderLost and RequestRefused."""
        seconds = self._limits.decode_s * (VIDEO_TIME if message.modality == "video" else 1)
        reserved = 0

        def reserve(length: int) -> None:
            """Charges the frame and the pixels that are unpacked from it."""
            nonlocal reserved
            if charge is not None:
                charge.take(2 * length)
                reserved = 2 * length

        try:
            answer = await child.ask(message, seconds * PATIENCE, reserve)
        except (TimeoutError, PeerGone) as error:
            if charge is not None:
                charge.give(reserved)
            raise await self._loss(child, error, seconds) from error
        if charge is not None:
            charge.give(reserved // 2)  # the frame
        assert isinstance(answer, DecodedMedia)
        return answer

    async def _loss(self, child: Child, error: Exception, seconds: float) -> Exception:
        if isinstance(error, TimeoutError):
            return DecoderLost(f"a decoder did not answer within {seconds * PATIENCE:g} s")
        status, how = await child.exit_status(), await child.describe_end()
        if status == -signal.SIGPROF:
            return BadMedia(f"takes more than {seconds:g} s to decode")
        return DecoderCrashed(f"its decoder {how}") if status in CRASHES else DecoderLost(f"a decoder {how}")

    async def _end(self, child: Child | None) -> None:
        """Ends a decoder, if there is one. The next use starts another one."""
        if child is not None:
            self._metrics.restarts.labels("decoder", "died").inc()
            self._children.discard(child)
            await child.kill()

    async def start(self) -> None:
        """Starts all decoders."""
        self._idle = [child or await self._start() for child in self._idle]

    async def _start(self) -> Child:
        command = [sys.executable, "-m", "reward_service.decoder", decode_limits(self._limits)]
        # The stacks of library threads would take up the limited address space.
        try:
            child = await Child.start(command, {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        except OSError as error:
            raise DecoderLost(f"a decoder cannot be started: {error}") from error
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
