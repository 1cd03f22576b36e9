"""What a run and an environment server share: tensors on the wire, and the proof of a token."""

from __future__ import annotations

import hmac
import stat
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from unirl.config.errors import ExposedServerError, UsageError
from unirl.envs.messages import ArrayBytes

FEWEST_LETTERS = 16


def array_bytes(values: Tensor) -> ArrayBytes:
    """A tensor of float32, int64 or uint8 as it travels."""
    array = values.contiguous().numpy()
    return msgspec.convert(
        {"dtype": array.dtype.name, "shape": array.shape, "data": array.tobytes()}, ArrayBytes, strict=False
    )


def tensor_of(values: ArrayBytes) -> Tensor:
    """The tensor that `array_bytes` was given."""
    dtypes = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}
    if not values.data:
        return torch.zeros(values.shape, dtype=dtypes[values.dtype])
    return torch.frombuffer(bytearray(values.data), dtype=dtypes[values.dtype]).reshape(values.shape)


def read_token(path: str | None) -> bytes:
    """The token in a file, or nothing without a file.

    Raises:
        UsageError: 2001, the file cannot be read; 2040, others may read it, or it holds no token.
    """
    if path is None:
        return b""
    try:
        mode, text = Path(path).stat().st_mode, Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {path} cannot be read: {error}. Name a file with a token") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ExposedServerError(
            f"the token file {path} has mode {stat.S_IMODE(mode):o}, so others may read it: run chmod 600 {path}"
        )
    if len(text) < FEWEST_LETTERS:
        raise ExposedServerError(f"the token file {path} has no token: write at least {FEWEST_LETTERS} letters in it")
    return text.encode()


def prove(token: bytes, nonce: bytes) -> bytes:
    """What shows that somebody holds the token, without the token."""
    return hmac.digest(token, nonce, "sha256")
