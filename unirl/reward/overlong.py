"""What a response costs for being long."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, limits: Tensor, buffer: int, factor: float = 1.0) -> Tensor:
    """[B] <= 0, to be added to rewards: 0 up to limit - buffer, then linear, -factor from the limit on.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    Args:
        lengths: [B] tokens per response.
        limits: [B] tokens at which each was to stop.

    Raises:
        ValueError: the buffer is longer than the longest response.
    """
    if not 0 < buffer <= int(limits.min()):
        raise ValueError(f"the buffer must lie in 1..{int(limits.min())}, the longest response, got {buffer} tokens")
    over = (lengths.double() - (limits - buffer)) / buffer
    return -factor * over.clamp(0.0, 1.0)
