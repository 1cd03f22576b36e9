"""Reads tensors that a client pickled by value, without running code from them.

A pickle may name any function. Here only those that rebuild a tensor from its bytes are known, as in SGLang.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2


def storage_of(data: bytes) -> Any:
    """A storage of torch from its bytes."""
    return torch.load(io.BytesIO(data), weights_only=True)


KNOWN: Mapping[tuple[str, str], Callable[..., object]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): storage_of,
    ("collections", "OrderedDict"): OrderedDict,
}


class TensorUnpickler(pickle.Unpickler):
    """An unpickler that knows nothing but tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """The function of that name. Raises UnpicklingError if it is none that rebuilds tensors."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"Blocked unsafe global: {module}.{name}")
        return KNOWN[module, name]


def tensors_in(payload: str) -> dict[str, Tensor]:
    """The tensors in base64 of a pickled list of (name, tensor), or of a pickled mapping, by name."""
    content = TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    return dict(content)
