"""Tensors in the bodies of requests: base64 of a pickle, which SGLang's servers read with a restricted unpickler."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Mapping

import torch
from torch import Tensor

ADAPTER_TENSOR = re.compile(r"(?P<layer>.+)\.(?P<side>lora_[AB])\.[^.]+\.weight")
"""The name of an adapter's tensor in the trained network."""


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory. A view would be pickled with all of the memory that it looks into."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def pickled(tensors: object) -> str:
    """Tensors by value, in the form in which the server reads them: base64 of a pickle."""
    return base64.b64encode(pickle.dumps(tensors)).decode("ascii")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in main memory."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
