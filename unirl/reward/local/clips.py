"""The clips of a request, and which of their frames to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from unirl.config.errors import RewardError
from unirl.types.reward import RewardRequest


def clips(request: RewardRequest, at_least: int) -> Iterator[tuple[str, Tensor]]:
    """The sample id and the frames [F, 3, H, W] of every row.

    Raises:
        RewardError: 6002 naming the sample with fewer than `at_least` frames.
    """
    assert request.videos is not None
    bounds: Sequence[int] = request.videos.offsets.tolist()
    for sample, start, stop in zip(request.sample_ids, bounds[:-1], bounds[1:], strict=True):
        if stop - start < at_least:
            raise RewardError(
                f"sample {sample!r} is a clip of {stop - start} frames, and this reward needs at least {at_least}: "
                "set sampling.num_frames higher, or choose another reward"
            )
        yield sample, request.videos.frames[start:stop]


def evenly_spaced(count: int, chosen: int) -> list[int]:
    """The middles of `chosen` equal parts of 0 .. count - 1; all of them when there are no more than that."""
    if count <= chosen:
        return list(range(count))
    return [(2 * part + 1) * count // (2 * chosen) for part in range(chosen)]
