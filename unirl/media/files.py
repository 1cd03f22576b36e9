"""Reads media files from disk: regular files within a size limit. The limits of an image."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


class UnreadableMedia(ValueError):
    """An image or video cannot be read; the message gives the reason."""


@dataclass(frozen=True)
class ImageLimits:
    """The limits of an image, which its header is compared with before its pixels are decoded."""

    pixels: int
    side: int | None = None
    """Largest side in pixels; None for no limit."""
    aspect: float | None = None
    """Largest ratio of the sides; None for no limit."""

    def check(self, width: int, height: int) -> None:
        """Raises UnreadableMedia for an image of another size."""
        size = f"it has {width} x {height} pixels"
        if width * height > self.pixels:
            raise UnreadableMedia(f"{size}: at most {self.pixels:,} are decoded. Scale it down")
        if self.side is not None and max(width, height) > self.side:
            raise UnreadableMedia(f"{size}: at most {self.side} along a side are decoded. Scale it down")
        if self.aspect is not None and max(width, height) > self.aspect * min(width, height):
            raise UnreadableMedia(f"{size}: one side may be at most {self.aspect:g} times the other. Crop it")


def read_regular(path: str | os.PathLike[str], max_bytes: int, flags: int = 0) -> bytes:
    """Returns the content of a regular file.

    Args:
        flags: further flags of `os.open`.

    Raises:
        OSError: it cannot be opened, or it is a directory, a FIFO, a socket or a device.
        UnreadableMedia: it is larger than `max_bytes`.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer, and opening some devices waits too.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read(max_bytes + 1)
    check_bytes(len(data), max_bytes)
    return data


def check_bytes(count: int, max_bytes: int) -> None:
    """Raises UnreadableMedia for a file of more than `max_bytes`."""
    if count > max_bytes:
        raise UnreadableMedia(f"the file has {count} bytes or more: at most {max_bytes} are read")


def read_below(path: str, roots: Sequence[str], max_bytes: int) -> bytes:
    """Returns the file at a path below one of the directories `roots`. All refusals have one text without a path."""
    refused = UnreadableMedia("video_path names no file below the service's media roots that may be read")
    if "\0" in path:
        raise refused
    for root in roots:
        base = os.path.realpath(root)
        real = os.path.realpath(os.path.join(base, path))
        if os.path.commonpath([base, real]) != base:
            continue
        with suppress(OSError):
            return read_regular(real, max_bytes, os.O_NOFOLLOW)  # the resolved path must not be a link
    raise refused
