"""Compiles the repeated blocks of a network, one by one, so that all blocks of a class share their graphs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

GRAPH_LIMIT = 64
"""Most graphs of a class of blocks. PyTorch's own limit of 8 is too low: a transformer of SD 3.5 needs 11."""


def compile_blocks(blocks: Sequence[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of each block in place.

    Numbers of rows and of tokens are marked as dynamic, so that other batches and texts need no further graphs.
    """
    warn_at_limit()
    for block in blocks:
        limit: dict[str, Any] = {"recompile_limit": GRAPH_LIMIT}
        compiled = torch.compile(block.forward, backend=backend, **limit)
        block.forward = partial(with_dynamic_sizes, compiled)


def with_dynamic_sizes(compiled: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """A call of `compiled`, with the sizes of its inputs that differ between batches marked."""
    for value in (*inputs, *named.values()):
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                mark(tensor)
    return compiled(*inputs, **named)


def mark(tensor: Tensor) -> None:
    """Mark the rows of a tensor, its tokens if it has three dimensions, and the keys of a mask, as dynamic."""
    dynamic = [0, *([1] if tensor.dim() == 3 else []), *([tensor.dim() - 1] if tensor.dtype == torch.bool else [])]
    for dimension in dynamic:
        if dimension < tensor.dim() and tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


class LimitHandler(logging.Handler):
    """Turns the compiler's log message about the limit into a warning that says what to do."""

    def emit(self, record: logging.LogRecord) -> None:
        """Warn once per function if the record is about the limit."""
        if "recompile_limit" not in record.getMessage():
            return
        function = record.args[2] if isinstance(record.args, tuple) else "a block"
        warnings.warn(
            f"torch.compile made {GRAPH_LIMIT} graphs of {function} and compiles no more: other shapes run uncompiled, "
            "which is slower. Use fewer sizes, or use_torch_compile: false",
            RuntimeWarning,
            stacklevel=2,
        )


@cache
def warn_at_limit() -> None:
    """Listen to the compiler's messages about the limit, once per process."""
    logging.getLogger("torch._dynamo.convert_frame").addHandler(LimitHandler())
