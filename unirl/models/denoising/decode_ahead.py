"""Decoding off the critical path: chunks that are sampled are decoded in a thread while the next one is sampled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from unirl.types.primitives import Images, Videos


class DecodeAhead:
    """One thread that decodes latents in the order in which they come; on a GPU on a stream of its own.

    A chunk's pixels have the bits that they have without it, since decoding runs in full chunks either way.
    """

    def __init__(self, decode: Callable[[Tensor], Images | Videos], device: torch.device) -> None:
        self.decode = decode
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._parts: list[Future[Images | Videos]] = []

    def __enter__(self) -> DecodeAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def add(self, latents: Tensor) -> None:
        """Decode the samples latents [b, *latent] of a chunk."""
        ready = None if self.stream is None else torch.cuda.current_stream(latents.device).record_event()
        self._parts.append(self._thread.submit(self._decoded, latents, ready))

    def result(self) -> Images | Videos:
        """All of them, in order. What decoding raised is raised here."""
        parts: list[Any] = [part.result() for part in self._parts]
        whole: Images | Videos = type(parts[0]).concat(parts)
        return whole

    def _decoded(self, latents: Tensor, ready: torch.cuda.Event | None) -> Images | Videos:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            if self.stream is not None and ready is not None:
                self.stream.wait_event(ready)
                latents.record_stream(self.stream)
            pixels = self.decode(latents)
            if self.stream is not None:
                self.stream.synchronize()
            return pixels
