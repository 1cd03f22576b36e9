"""A safetensors file in main memory, which the server reads as the weights of a component of a model."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from unirl.rollout.engine.serving.payloads import bytes_of

DTYPES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The names of dtypes in safetensors files."""


class SharedFile:
    """One file without a name, to which a link leads. Its memory is free when this process ends, however that ends.

    The memory is kept from bucket to bucket, since new memory takes longer than writing it.
    """

    def __init__(self, folder: Path, component: str) -> None:
        """
        Args:
            folder: becomes the folder of a model that has the component alone.
        """
        self.folder = folder
        self.file = os.fdopen(os.memfd_create("unirl-weights"), "w+b")
        weakref.finalize(self, self.file.close)
        (folder / component).mkdir(parents=True, exist_ok=True)
        link = folder / component / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/{os.getpid()}/fd/{self.file.fileno()}")

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the contents of the file by these tensors."""
        self.file.seek(0)
        self.file.write(header_of(tensors))
        for tensor in tensors.values():
            self.file.write(bytes_of(tensor))
        self.file.truncate()
        self.file.flush()


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a safetensors file: the length of the header, and the header. The tensors follow it in order."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
