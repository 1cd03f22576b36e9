"""The streams, memory and counters of emulated devices, and the module `torch.emulated`, the counterpart of torch.cuda.

Operations run at once. A copy to the host arrives as late as the waits of the host allow. An operation may only read
what its own stream wrote, what its stream has waited for, and what the host has waited for.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from unirl.testing.second_device import DeviceTensor

OWN_FILES = ("emulated_streams", "second_device")
"""The modules of the emulation. Their lines are never named as the place of a wait."""
NAME = "emulated"
"""The type of the devices, as in `torch.device("emulated", 0)`."""


class DeviceMismatch(RuntimeError):
    """An operation got tensors of different devices."""


class StreamRace(RuntimeError):
    """An operation reads what another stream may not have written yet."""


class Stream:
    """A queue of work on one device. It knows how much work of each other stream ends before its own next operation."""

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self.index = index_of(device)
        self.done = 0
        self.waits_for: dict[Stream, int] = {}
        state().streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        """Start no further work before all work that `other` has now is done."""
        self._wait(other, other.done, other.waits_for)

    def wait_event(self, event: Event) -> None:
        """Start no further work before that which `event` marks is done."""
        self._wait(event.stream, event.count, event.waits_for)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the work that the stream has now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait until all work that the stream has now is done."""
        state().wait("stream.synchronize")
        state().deliver(self, self.done, self.waits_for)

    def query(self) -> bool:
        """False: an emulated device is always as slow as it may be."""
        return False

    def follows(self, writer: Stream, count: int) -> bool:
        """True if the first `count` operations of `writer` end before the next one of this stream starts."""
        return writer is self or self.waits_for.get(writer, 0) >= count

    def _wait(self, other: Stream, count: int, waits_for: Mapping[Stream, int]) -> None:
        for stream, n in [(other, count), *waits_for.items()]:
            self.waits_for[stream] = max(self.waits_for.get(stream, 0), n)


class Event:
    """A mark in the work of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.count = 0
        self.stream: Stream = current_stream()
        self.waits_for: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that `stream`, or the current stream, has now."""
        self.stream = stream or current_stream()
        self.count, self.waits_for = self.stream.done, dict(self.stream.waits_for)

    def wait(self, stream: Stream | None = None) -> None:
        """Let `stream`, or the current stream, wait for the mark."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        state().wait("event.synchronize")
        state().deliver(self.stream, self.count, self.waits_for)

    def query(self) -> bool:
        """False: an emulated device is always as slow as it may be."""
        return False


@dataclass(eq=False)
class Delivery:
    """An asynchronous copy to the host that has not arrived."""

    stream: Stream
    count: int
    """Number of operations of the stream that end before the copy has arrived."""
    host: Tensor
    """The memory that the copy goes to. It is held, since a view of it may be all that the program keeps."""
    content: Tensor


class CaptureError(RuntimeError):
    """A graph is captured of work that needs the host."""


@dataclass(eq=False)
class CUDAGraph:
    """The operations between the begin and the end of a capture, which `replay` runs again on the same memory.

    As on CUDA, captured work does not run: what it wrote is put back when the capture ends. Memory that the operations
    allocated belongs to the graph.
    """

    operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = field(
        default_factory=list
    )
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Key of a storage -> a tensor with all of it that an operation wrote, and its content before."""

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on tensors of the host, and record it."""
        written = [
            kwargs.get(a.name) if a.kwarg_only else args[i] if i < len(args) else None
            for i, a in enumerate(func._schema.arguments)
            if a.is_write
        ]
        for tensor in written:
            if isinstance(tensor, Tensor):
                whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                self.before.setdefault(tensor.untyped_storage().data_ptr(), (whole, whole.clone()))
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result

    def replay(self) -> None:
        """Run the operations. The host launches once."""
        stream = current_stream()
        state().started(stream, [])
        for func, args, kwargs, outputs in self.operations:
            results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, result in zip(outputs, results, strict=True):
                if output is not result and output.shape == result.shape:  # `out=` resizes an empty tensor
                    output.copy_(result)


@contextmanager
def _capture(graph: CUDAGraph, pool: object = None) -> Iterator[None]:
    state().capturing = graph
    try:
        yield
    finally:
        state().capturing = None
        for whole, content in graph.before.values():
            whole.copy_(content)


@dataclass(eq=False)
class Devices:
    """Counts of waits, operations and bytes of the emulated devices, and the state of their streams."""

    count: int = 1
    memory: int = 16 * 2**30
    """Bytes of each device. More can be allocated."""
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of wait, "file:line" of the caller) -> how often the host waited for a device."""
    launches: Counter[int] = field(default_factory=Counter)
    """Index of the device -> operations, views excepted."""
    allocated: Counter[int] = field(default_factory=Counter)
    """Index of the device -> bytes of tensors that are alive."""
    peak: Counter[int] = field(default_factory=Counter)
    """Index of the device -> the most bytes that were alive at one time."""
    packages: tuple[str, ...] = ("unirl",)
    """The packages whose lines are counted; if none of them is on the stack, the innermost line outside of torch is."""
    capturing: CUDAGraph | None = None
    in_flight: list[Delivery] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    ended: dict[Stream, int] = field(default_factory=dict)
    """Stream -> number of its operations that the host knows to have ended."""
    default_streams: dict[int, Stream] = field(default_factory=dict)
    storages: dict[int, list[int]] = field(default_factory=dict)
    """Key of a storage -> [number of tensors that share it, bytes]."""
    written: dict[int, tuple[Stream, int]] = field(default_factory=dict)
    """Key of a storage -> the stream that wrote it last, and the number of that stream's operations by then."""

    def reset(self) -> None:
        """Forget the counts. Memory that is in use stays counted."""
        self.syncs.clear()
        self.launches.clear()
        self.peak = Counter(self.allocated)

    def default_stream(self, index: int) -> Stream:
        """The stream that a device has from the start."""
        if index not in self.default_streams:
            self.default_streams[index] = Stream(index)
        return self.default_streams[index]

    def wait(self, kind: str) -> None:
        """Count a wait of the host."""
        if self.capturing is not None:
            raise CaptureError(f"the host waits for the device ({kind}) at {self.caller()} while a graph is captured")
        self.syncs[kind, self.caller()] += 1

    def caller(self) -> str:
        """The innermost line of `packages`, as "unirl/types/batch.py:190"."""
        frame: FrameType | None = sys._getframe(1)
        outer = ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.rpartition(".")[2] not in OWN_FILES and not module.startswith("torch"):
                place = f"{module.replace('.', '/')}.py:{frame.f_lineno}"
                if module.partition(".")[0] in self.packages:
                    return place
                outer = outer or place
            frame = frame.f_back
        return outer

    def deliver(self, stream: Stream, count: int, waits_for: Mapping[Stream, int]) -> None:
        """Record that the host has waited for `count` operations of `stream`, and let the copies among them arrive."""
        for waited, n in [(stream, count), *waits_for.items()]:
            self.ended[waited] = max(self.ended.get(waited, 0), n)
        arrived = [copy for copy in self.in_flight if copy.count <= self.ended.get(copy.stream, 0)]
        self.in_flight = [copy for copy in self.in_flight if copy not in arrived]
        for copy in arrived:
            copy.host.copy_(copy.content)

    def wait_all(self, index: int) -> None:
        """Let the host wait for all work of a device."""
        self.wait("synchronize")
        for stream in [stream for stream in self.streams if stream.index == index]:
            self.deliver(stream, stream.done, stream.waits_for)

    def started(self, stream: Stream, inputs: Sequence[DeviceTensor]) -> None:
        """Count an operation, and check that `stream` may read `inputs`. Raises StreamRace."""
        for tensor in inputs:
            writer, count = self.written.get(tensor.storage_key, (stream, 0))
            if not stream.follows(writer, count) and self.ended.get(writer, 0) < count:
                raise StreamRace(
                    f"a tensor of shape {tuple(tensor.shape)} was written on another stream, and the stream that reads "
                    f"it at {self.caller()} does not wait for that: call wait_stream or wait_event first"
                )
        stream.done += 1
        self.launches[stream.index] += 1

    def allocate(self, index: int, data: Tensor) -> int:
        """Count the storage of `data`, once for all tensors that share it. Returns its key."""
        storage = data.untyped_storage()
        key = storage._cdata
        entry = self.storages.setdefault(key, [0, 0])
        grown = storage.nbytes() - entry[1]  # more than 0 also for `out=` that was resized, as in arange
        entry[0] += 1
        entry[1] += grown
        self.allocated[index] += grown
        self.peak[index] = max(self.peak[index], self.allocated[index])
        return key

    def free(self, index: int, key: int) -> None:
        """Count one tensor less on the storage `key`."""
        entry = self.storages[key]
        entry[0] -= 1
        if entry[0] == 0:
            del self.storages[key]
            self.written.pop(key, None)
            self.allocated[index] -= entry[1]


# The module torch.emulated, which PyTorch asks for everything that it asks of torch.cuda.


class _Thread(threading.local):
    """The current device and streams of a thread."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[tuple[Devices, int], Stream] = {}


THREAD = _Thread()
ACTIVE: list[Devices] = []


def state() -> Devices:
    """The devices of the open context. Raises RuntimeError if there is none."""
    if not ACTIVE:
        raise RuntimeError("a tensor of an emulated device is used outside `with second_devices()`")
    return ACTIVE[-1]


def index_of(device: torch.device | str | int | None) -> int:
    """The index of a device; that of the current device if none is given."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return THREAD.index if index is None else index


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    """The stream that operations on `device` go to in this thread."""
    index = index_of(device)
    return THREAD.streams.get((state(), index)) or state().default_stream(index)


@contextmanager
def _use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream(stream.index)
    THREAD.streams[state(), stream.index] = stream
    try:
        yield
    finally:
        THREAD.streams[state(), stream.index] = before


@contextmanager
def _use_device(device: torch.device | str | int | None) -> Iterator[None]:
    before, THREAD.index = THREAD.index, index_of(device)
    try:
        yield
    finally:
        THREAD.index = before


def _set_device(device: torch.device | str | int) -> None:
    THREAD.index = index_of(device)


def _reset_peak(device: torch.device | str | int | None = None) -> None:
    index = index_of(device)
    state().peak[index] = state().allocated[index]


def _generator_state(device: object = None) -> Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


MODULE: dict[str, Callable[..., Any]] = {
    "is_available": lambda: bool(ACTIVE),
    "is_initialized": lambda: bool(ACTIVE),
    "device_count": lambda: ACTIVE[-1].count if ACTIVE else 0,
    "current_device": lambda: THREAD.index,
    "set_device": _set_device,
    "device": _use_device,
    "Stream": Stream,
    "Event": Event,
    "stream": _use_stream,
    "current_stream": current_stream,
    "CUDAGraph": CUDAGraph,
    "graph": _capture,
    "graph_pool_handle": lambda: None,
    "default_stream": lambda device=None: state().default_stream(index_of(device)),
    "synchronize": lambda device=None: state().wait_all(index_of(device)),
    "memory_allocated": lambda device=None: state().allocated[index_of(device)],
    "max_memory_allocated": lambda device=None: state().peak[index_of(device)],
    "memory_reserved": lambda device=None: state().allocated[index_of(device)],
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": lambda device=None: SimpleNamespace(name=NAME, total_memory=state().memory),
    "mem_get_info": lambda device=None: (state().memory - state().allocated[index_of(device)], state().memory),
    "reset_peak_memory_stats": _reset_peak,
    "empty_cache": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": _generator_state,
    "set_rng_state": _set_generator_state,
    "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": lambda: None,
}
