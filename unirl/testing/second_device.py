"""A second device on a CPU. It finds what a run on a CPU alone cannot show and what a GPU shows late, or never.

    with second_devices(count=2) as devices:
        tensor = torch.ones(3, device="emulated:0")

Tensors of an emulated device are a type of their own whose data lie in CPU memory, and PyTorch treats the device as it
treats CUDA. The differences to a CPU that break programs are kept:

- An operation on tensors of two devices raises DeviceMismatch.
- A copy to the host with `non_blocking=True` returns NaN (0 for integers) until the host waits for the stream.
- Work on one stream that reads what another stream wrote raises StreamRace unless it waits for it first.
- Every time the host waits for the device is counted by its line. Each operation counts as one launch.
- Bytes in use are counted per device.
- A graph of operations can be captured, if they need nothing of the host, and replayed on the same memory.

Not emulated: overwriting what another stream still reads, reuse of memory across streams (`record_stream`), pinned
memory, the workspace of an operation, asynchronous copies to the device (their source is read at once), and the
numerics of a GPU. Results equal those of a CPU to the bit, except that attention is computed as the composition of its
matrix products and softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from unirl.testing.emulated_streams import (
    ACTIVE,
    MODULE,
    NAME,
    THREAD,
    CaptureError,
    Delivery,
    DeviceMismatch,
    Devices,
    Stream,
    current_stream,
    index_of,
    state,
)

aten = torch.ops.aten

INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations with tensors of indices."""

MAY_MIX = {*INDEXING, aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}
"""Operations that CUDA allows on tensors of two devices. Indices may lie on the CPU."""

HAS_DYNAMIC_SHAPE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
"""Operations whose result has a size that only the device knows: the host waits for it."""

GIVES_HOST_VALUES = {aten._local_scalar_dense.default: "item", aten.equal.default: "equal"}
"""Operations whose result is a number on the host."""

IN_LOW_PRECISION = [
    *("linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "_convolution", "conv_transpose1d"),
]
"""Operations that autocast runs in 16 bits on CUDA and on CPUs."""

SEQUENCES = (tuple, list)
CONTAINERS = (tuple, list, dict)
"""The types that the arguments and results of an operation may be nested in."""


class Allocation:
    """One tensor's share in a storage of a device."""

    def __init__(self, devices: Devices, index: int, data: Tensor) -> None:
        self.devices, self.index = devices, index
        self.key = devices.allocate(index, data)

    def __del__(self) -> None:
        self.devices.free(self.index, self.key)


class DeviceTensor(Tensor):
    """A tensor of an emulated device. `content` is its data on the CPU."""

    content: Tensor
    allocation: Allocation

    @staticmethod
    def __new__(cls, content: Tensor, device: torch.device) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=device,
        )

    def __init__(self, content: Tensor, device: torch.device) -> None:
        self.hold(content)

    def hold(self, content: Tensor) -> None:
        """Take `content` as the data of this tensor."""
        self.content = content
        self.allocation = Allocation(state(), self.device.index, content)

    @property
    def storage_key(self) -> int:
        """The same for all tensors that share memory."""
        return self.allocation.key

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # C functions have no types

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives the arguments by position
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # copies shape and dtype
        assert isinstance(value, DeviceTensor), "PyTorch refuses a tensor of another device"
        self.hold(value.content)

    def record_stream(self, s: object) -> None:
        """Nothing: the memory of a tensor is free when the last reference to it is gone."""

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["content"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], device: torch.device, size: object, stride: object) -> Tensor:
        return DeviceTensor(inner["content"], device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.content!r}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a tensor of {self.device} cannot leave its process: copy it to the CPU first")


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of PyTorch whose tensors or whose `device` are emulated."""
    devices = state()
    leaves = [*_leaves(args), *_leaves(kwargs)]
    inputs = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    target = _target(func, args, kwargs, inputs)
    _check_devices(func, args, leaves, inputs)
    stream = current_stream(target or inputs[0].device)
    for device in {tensor.device for tensor in inputs}:
        if device.index != stream.index:  # a copy between devices waits for the current streams of both, as on CUDA
            stream.wait_stream(current_stream(device))
    if not func.is_view:
        devices.started(stream, inputs)
    host_kwargs = _mapped(_on_cpu, kwargs)
    if "pin_memory" in kwargs:
        host_kwargs["pin_memory"] = None
    host_args = _mapped(_on_cpu, args)
    if devices.capturing is None:
        result = func(*host_args, **host_kwargs)
    else:
        if any(_is_tensor(leaf) and leaf.dim() and not isinstance(leaf, DeviceTensor) for leaf in leaves):
            raise CaptureError(f"{func} reads a tensor of the host at {devices.caller()} while a graph is captured")
        result = devices.capturing.record(func, host_args, host_kwargs)
    if target is None:
        return _to_host(func, args, kwargs, stream, result)
    _count_wait(func, args, kwargs, inputs)
    for tensor in inputs if _has_out(func) else []:
        if tensor.shape != tensor.content.shape:  # `out=` was resized
            tensor.data = DeviceTensor(tensor.content, tensor.device)
    same = {id(tensor.content): tensor for tensor in inputs}
    result = _mapped(
        lambda out: (same[id(out)] if id(out) in same else DeviceTensor(out, target)) if _is_tensor(out) else out,
        result,
    )
    if not func.is_view:
        for out in _leaves(result):
            if isinstance(out, DeviceTensor):
                devices.written[out.storage_key] = stream, stream.done
    return return_and_correct_aliasing(func, args, kwargs, result) if inputs else result


def _leaves(value: Any) -> list[Any]:
    """The values in nested tuples, lists and dicts. PyTorch's `tree_leaves` takes far longer than most operations."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, SEQUENCES):
        return [value]
    leaves = []
    for item in value:
        if isinstance(item, CONTAINERS):
            leaves += _leaves(item)
        else:
            leaves.append(item)
    return leaves


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples, lists and dicts with `function` applied to each value in them."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if not isinstance(value, SEQUENCES):
        return function(value)
    items = [_mapped(function, item) if isinstance(item, CONTAINERS) else function(item) for item in value]
    return items if isinstance(value, list) else tuple(items)


@cache
def _has_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.content
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[DeviceTensor]
) -> torch.device | None:
    """The emulated device of the results; None if they lie on the host."""
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        return torch.device(NAME, index_of(wanted)) if wanted.type == NAME else None
    if func is aten.copy_.default and not isinstance(args[0], DeviceTensor):
        return None
    return inputs[0].device if func not in GIVES_HOST_VALUES else None


def _check_devices(func: Any, args: tuple[Any, ...], leaves: list[Any], inputs: list[DeviceTensor]) -> None:
    """Raises DeviceMismatch if the tensors of an operation lie on several devices."""
    indexed_on_host = func in INDEXING and inputs and not isinstance(args[0], DeviceTensor)
    if func in MAY_MIX and not indexed_on_host:
        return
    tensors = [leaf for leaf in leaves if _is_tensor(leaf) and (leaf.dim() > 0 or isinstance(leaf, DeviceTensor))]
    if len({tensor.device for tensor in tensors}) > 1:
        listed = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise DeviceMismatch(f"{func} got tensors of several devices at {state().caller()}: {listed}")


def _to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream, result: Any) -> Any:
    """The result on the host: after a wait, or as a copy that is still to arrive."""
    devices = state()
    non_blocking = kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] and args[2])
    if not (_is_tensor(result) and non_blocking):
        devices.wait(GIVES_HOST_VALUES.get(func, "to the host"))
        devices.deliver(stream, stream.done, stream.waits_for)
        return result
    delivery = Delivery(stream, stream.done, result, result.clone())
    devices.in_flight.append(delivery)
    result.fill_(float("nan") if result.is_floating_point() else 0)
    return result


def _count_wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[DeviceTensor]) -> None:
    """Count the wait of an operation whose result is on the device."""
    kind = None
    if func in HAS_DYNAMIC_SHAPE or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
        kind = "size of a result"
    elif func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            kind = "size of a result"
        elif not all(isinstance(index, DeviceTensor) for index in indices):
            kind = "indices to the device"
    elif func is aten._to_copy.default and not inputs and args[0].numel() and not kwargs.get("non_blocking"):
        kind = "to the device"
    elif func is aten.copy_.default and not isinstance(args[1], DeviceTensor):
        kind = None if kwargs.get("non_blocking") or (args[2:] and args[2]) else "to the device"
    if kind is not None:
        state().wait(kind)


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Make the type of device known to this process, which PyTorch allows once and for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = ModuleType(f"torch.{NAME}")
    for name, function in MODULE.items():
        setattr(module, name, function)
    _setup_privateuseone_for_python_backend(NAME, module)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda func, *args, **kwargs: call(func, args, kwargs), "PrivateUse1")
    copies = torch.library.Library("aten", "IMPL")
    copies.impl("_copy_from", _copy_from, "PrivateUse1")
    copies.impl("_local_scalar_dense", _item, "PrivateUse1")
    autocast = torch.library.Library("aten", "IMPL")
    for operation in IN_LOW_PRECISION:
        autocast.impl(operation, partial(_autocast, getattr(aten, operation).default), "AutocastPrivateUse1")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return fallback, copies, autocast, rest


def _autocast(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one operation in the data type of `torch.autocast`."""
    dtype = torch.get_autocast_dtype(NAME)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, DeviceTensor) and value.dtype is torch.float32 else value

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    with torch._C._ExcludeDispatchKeyGuard(key):
        return func(*_mapped(cast, args), **_mapped(cast, kwargs))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values to the device for `torch.tensor(values, device=...)`, which PyTorch does not show to the tensors."""
    call(aten.copy_.default, (target, source, non_blocking), {})
    return target


def _item(tensor: Tensor) -> Any:
    """Read one number for `torch.tensor([tensor, tensor], device=...)`, which PyTorch does not show to the tensors."""
    return call(aten._local_scalar_dense.default, (tensor,), {})


@contextmanager
def second_devices(count: int = 1) -> Iterator[Devices]:
    """Give this process `count` devices of type "emulated" while the context is open."""
    _register()
    devices, THREAD.index = Devices(count), 0
    ACTIVE.append(devices)
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter that moves stays the same object
    try:
        with torch.autograd.set_multithreading_enabled(False):  # its threads are made for the first device alone
            yield devices
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
        ACTIVE.remove(devices)
