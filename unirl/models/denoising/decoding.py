"""Decoded pixels on their way to the host: rounded chunk by chunk, copied while the device goes on, waited for once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context

import torch
from torch import Tensor

from unirl.config.errors import DivergenceError
from unirl.types.device import HostRows, device_module
from unirl.types.primitives import Images, Videos, levels_of

DecodeRows = Callable[[int, Tensor], None]
"""Decodes latents [b, *latent] to the rows from a number on."""


class PixelRows:
    """The images or videos of a rollout. The device keeps the pixels of no more than one chunk."""

    def __init__(self, count: int) -> None:
        self.rows = HostRows(count)

    def put(self, start: int, pixels: Tensor) -> None:
        """Round pixels [b, 3, H, W] or [b, 3, F, H, W] in [0, 1], and start to copy them to the rows from `start`."""
        levels = levels_of(pixels)
        by_frame = levels if levels.dim() == 4 else levels.transpose(1, 2)
        self.rows.put(start, (by_frame, pixels.isfinite().flatten(1).all(1)))

    def arrived(self, sample_ids: Sequence[str], fps: float) -> Images | Videos:
        """The images, or the videos with `fps` frames per second.

        Raises:
            DivergenceError: a sample has pixels that are not finite, which have no level.
        """
        levels, finite = self.rows.arrived()
        broken = (~finite).nonzero().flatten().tolist()
        if broken:
            raise DivergenceError(
                f"sample {sample_ids[broken[0]]!r} was decoded to pixels that are not finite ({len(broken)} of "
                f"{len(finite)} samples): the policy or the VAE overflows. Lower the learning rate, or resume from an "
                "earlier checkpoint"
            )
        return Images(pixels=levels) if levels.dim() == 4 else Videos.of_frames(levels, fps)


@contextmanager
def decoding_thread(decode: DecodeRows, device: torch.device) -> Iterator[DecodeRows]:
    """A function that decodes latents in a thread while the next ones are sampled; on a GPU in a stream of its own.

    At the end of the block, all are decoded or on their way. The pixels have the same bits as without the thread, since
    decoding always runs in chunks of one size.
    """
    module = device_module(device)
    stream = None if module is None else module.Stream(device)

    def decode_beside(start: int, latents: Tensor, ready: torch.Event | None) -> None:
        if module is None or stream is None or ready is None:
            return decode(start, latents)
        with module.stream(stream):
            stream.wait_event(ready)
            latents.record_stream(stream)
            decode(start, latents)

    thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
    pending = []

    def submit(start: int, latents: Tensor) -> None:
        ready = None if module is None else module.current_stream(latents.device).record_event()
        pending.append(thread.submit(copy_context().run, decode_beside, start, latents, ready))

    try:
        yield submit
        for each in pending:
            each.result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
