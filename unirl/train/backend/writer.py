"""Writes tensors as safetensors files: at once, or from copies in main memory while training goes on.

A write in the background copies the tensors into buffers that are kept from save to save, laid out as the files are.
Then one thread per process writes and hashes the buffers. Hashing, writing and flushing run outside the interpreter's
lock, so the thread does not delay Python code. It dies with its process, so no writer outlives a killed run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unirl.train.backend.manifest import FileEntry, record_written
from unirl.types.device import CPU
from unirl.types.progress import progress

CHUNK = 8 * 2**20
"""Bytes that are hashed and written at a time."""
PROGRESS_S = 1.0
"""Seconds between two reports of progress while a call waits for a write."""
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names of dtypes in safetensors files, in the order in which the format's own writer stores them."""
SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key under which torch.distributed.checkpoint reads the position of rows in the whole tensors."""


@dataclass(frozen=True)
class Piece:
    """The rows of one tensor that this rank writes."""

    tensor: Tensor
    first_row: int | None = None
    """The position of the rows in the whole tensor. None: the tensor is whole."""


Pieces = Mapping[str, Piece]
"""The pieces of one file by the names of their tensors."""


class FileWriter:
    """Writes the files of one process. At most one write in the background is under way."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        """The copies of the last write in the background, by the name of the file."""
        self.pending: Future[None] | None = None
        self.num_chunks = 0
        """Chunks written in the background. A call that waits for them has made progress if they have become more."""
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")

    def write(self, directory: Path, files: Mapping[str, Pieces]) -> None:
        """Write the files, and return when they are written. They are not flushed."""
        for name, pieces in files.items():
            header, size = layout_of(pieces)
            data = filled(torch.empty(size, dtype=torch.uint8), pieces)
            with open(directory / name, "wb") as file:
                file.write(header)
                file.write(data.numpy().data)

    def begin(self, directory: Path, files: Mapping[str, Pieces]) -> None:
        """Copy the tensors, and write, hash and flush the files in the background.

        A receipt beside each file says that it is whole (`record_written`).
        """
        self.finish(wait=True)
        headers: dict[str, bytes] = {}
        for name, pieces in files.items():
            headers[name], size = layout_of(pieces)
            if name not in self.buffers or len(self.buffers[name]) != size:
                on_device = any(piece.tensor.device != CPU for piece in pieces.values())
                self.buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=on_device)
            filled(self.buffers[name], pieces)
        self.pending = self.executor.submit(self._write_all, directory, headers)

    def finish(self, wait: bool) -> None:
        """Raise the exception of the write under way if it failed, after its end if `wait`."""
        while wait and self.pending is not None and not self.pending.done():
            before = self.num_chunks
            futures_wait([self.pending], PROGRESS_S)
            if self.num_chunks > before:
                progress("chunk of a checkpoint written")
        if self.pending is not None and self.pending.done():
            pending, self.pending = self.pending, None
            pending.result()

    def _write_all(self, directory: Path, headers: Mapping[str, bytes]) -> None:
        for name, header in headers.items():
            entry = write_hashed(directory / name, header, self.buffers[name], self._count)
            record_written(directory / name, entry)

    def _count(self) -> None:
        self.num_chunks += 1


def layout_of(pieces: Pieces) -> tuple[bytes, int]:
    """The header of a safetensors file, with its length before it, and the number of bytes that follow."""
    header: dict[str, object] = {}
    end = 0
    for name, piece in _in_order(pieces):
        start, end = end, end + piece.tensor.numel() * piece.tensor.element_size()
        header[name] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [start, end],
        }
    offsets = {
        name: {"saved_offsets": [piece.first_row, *[0] * (piece.tensor.dim() - 1)][: piece.tensor.dim()]}
        for name, piece in pieces.items()
        if piece.first_row is not None
    }
    if offsets:
        header = {"__metadata__": {SHARDING_INFO: json.dumps(offsets), "format": "pt"}} | header
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def filled(buffer: Tensor, pieces: Pieces) -> Tensor:
    """`buffer` [bytes] after the tensors were copied into it, one after another as `layout_of` says."""
    end = 0
    for _, piece in _in_order(pieces):
        tensor = piece.tensor.detach()
        start, end = end, end + tensor.numel() * tensor.element_size()
        buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return buffer


def write_hashed(path: Path, header: bytes, data: Tensor, count: Callable[[], None]) -> FileEntry:
    """Write and flush a file, and return its size and hash. Nothing is read back.

    Args:
        count: called after each chunk.
    """
    digest = hashlib.sha256(header)
    view = data.numpy().data
    with open(path, "wb") as file:
        file.write(header)
        for start in range(0, len(view), CHUNK):
            digest.update(view[start : start + CHUNK])
            file.write(view[start : start + CHUNK])
            count()
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, len(header) + len(view), digest.hexdigest())


def _in_order(pieces: Pieces) -> list[tuple[str, Piece]]:
    """Pieces as the format's own writer orders them: by dtype, the widest first, then by name."""
    dtypes = list(DTYPES)
    return sorted(pieces.items(), key=lambda item: (dtypes.index(item[1].tensor.dtype), item[0]))
