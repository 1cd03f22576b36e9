"""The dtypes in which libraries load a network: the chosen one, except where a class keeps parameters in float32.

diffusers and transformers declare such parameters by words: a parameter is kept if a part of its name is one of the
words of its class. Both build tensors that no file holds, such as tables of rotary embeddings, in a dtype of their own.
"""

from __future__ import annotations

import torch
from torch import nn

_COMPUTE_DTYPE = "unirl_compute_dtype"
"""The attribute of a trained module whose parameters are stored in another dtype than that in which it computes."""


def dtype_in(kind: type[nn.Module], name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter of class `kind` in a network that is loaded in `dtype`. `name` is relative to `kind`."""
    return torch.float32 if _words(kind, dtype).intersection(name.split(".")) else dtype


def kept_parameters(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """The names of the parameters and buffers that stay in float32 when `module` is loaded in `dtype`."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if _words(type(part), dtype)
        for tensors in (part.named_parameters(), part.named_buffers())
        for name, _ in tensors
        if dtype_in(type(part), name, dtype) != dtype
    }


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert `module` in place to the dtypes that it has when a library loads it in `dtype`."""
    kept = kept_parameters(module, dtype)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if name in kept else dtype)


def set_compute_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Record the dtype in which the matrices of `module` compute. None: that in which they are stored."""
    vars(module)[_COMPUTE_DTYPE] = dtype


def compute_dtype(module: nn.Module, matrix: str) -> torch.dtype:
    """The dtype in which the matrices of `module` compute, of which `matrix` names one."""
    return vars(module).get(_COMPUTE_DTYPE) or module.get_parameter(matrix).dtype


def _words(kind: type[nn.Module], dtype: torch.dtype) -> set[str]:
    """The words by which a class of diffusers or transformers declares parameters that it keeps in float32."""
    listed = getattr(kind, "_keep_in_fp32_modules", None) or ()
    if hasattr(kind, "_keep_in_fp32_modules_strict"):  # transformers, whose first list is for fp16 alone
        strict = kind._keep_in_fp32_modules_strict or ()
        listed = (*strict, *listed) if dtype == torch.float16 else strict
    return set(listed) if dtype != torch.float32 else set()
