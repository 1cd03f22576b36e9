"""What a response costs for being long."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """[B] <= 0, to be added to rewards: 0 up to max_length - buffer, then linear, -factor from max_length on.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    Args:
        lengths: [B] tokens per response.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong_penalty: buffer must lie in [1, max_length={max_length}], got {buffer}")
    over = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * over.clamp(0.0, 1.0)
