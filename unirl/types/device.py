"""The accelerators of this process, and copies between them and the host.

This is the only module of the package that names `torch.cuda`. Elsewhere a device is the CPU or an accelerator.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
DEVICE_FILES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 2**30


def accelerator(index: int = 0) -> torch.device:
    """Accelerator `index` of this process, modulo their number; the CPU if there is none that has float64."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # log-probs are summed in float64, which Apple's GPUs lack
        return CPU
    return torch.device(kind.type, index % torch.accelerator.device_count())


def num_accelerators() -> int:
    """The accelerators that this process can compute on; 0 where it computes on the CPU."""
    return 0 if accelerator() == CPU else torch.accelerator.device_count()


def num_installed() -> int:
    """The NVIDIA GPUs of this machine, or of this container, by their device files."""
    return len(list(DEVICE_FILES.glob("nvidia[0-9]*")))


def visibility_problem(setting: str, installed: int) -> str | None:
    """What is wrong with a value of CUDA_VISIBLE_DEVICES, as a sentence. None if it names GPUs that exist.

    CUDA says nothing: it hides the first name that it does not know and all that follow, and all GPUs if one is named
    twice. A negative index ends the list.

    Args:
        installed: the GPUs of the machine. 0: not known.
    """
    names = [name.strip() for name in setting.split(",")]
    if names == [""]:
        return "It is empty, which hides all GPUs"
    seen: set[str] = set()
    for name in names:
        if re.fullmatch(r"-\d+", name):
            return None
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            return f"{name!r} is neither the index nor the UUID of a GPU, and hides itself and all that follow"
        if name.isdecimal() and installed and int(name) >= installed:
            return (
                f"There is no GPU {name} (the machine has 0 to {installed - 1}), which hides itself and all that follow"
            )
        if name in seen:
            return f"It names {name} twice, which hides all GPUs"
        seen.add(name)
    if len(names) > 1 and names[0].startswith("MIG-"):
        return "CUDA shows a process only the first of several MIG instances"
    return None


def unusable_gpu() -> str | None:
    """Why PyTorch cannot use the NVIDIA GPU of this machine, and the way out. None if it can, or there is none to use.

    An empty CUDA_VISIBLE_DEVICES, or -1, leaves none to use. `DRIVER` exists on every machine with a driver, also in
    containers without a GPU, so the device files decide.
    """
    setting = os.environ.get(VISIBLE)
    hidden = setting is not None and setting.strip() in ("", "-1")
    if hidden or not num_installed() or torch.cuda.is_available():
        return None
    problem = None if setting is None else visibility_problem(setting, num_installed())
    if problem is not None:
        return (
            f"{VISIBLE}={setting} hides the GPUs of this machine. {problem}. Name GPUs of the machine (nvidia-smi -L "
            f"lists them), unset {VISIBLE}, or set it to -1 to compute on the CPU"
        )
    driver = f"driver {driver_version() or 'of unknown version'}"
    built = f"for CUDA {cuda_version()}" if cuda_version() else "without CUDA"
    return (
        f"this machine has an NVIDIA GPU and {driver}, but torch {torch.__version__}, built {built}, cannot use it. "
        "Install a torch built for a CUDA version that the driver supports (nvidia-smi shows it) or a newer driver, "
        "or set CUDA_VISIBLE_DEVICES=-1 to compute on the CPU"
    )


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as "535.183.01"; None where there is none."""
    result = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", DRIVER.read_text()) if DRIVER.exists() else None
    return result[1] if result else None


def cuda_version() -> str | None:
    """The version of CUDA that this torch is built for; None without CUDA."""
    return torch.version.cuda


def device_module(device: torch.device) -> ModuleType | None:
    """The module with the streams, events and memory of a device, such as torch.cuda; None for a CPU."""
    return torch.get_device_module(device) if device.type != "cpu" else None


def device_name(device: torch.device) -> str:
    """The product name of an accelerator, such as "NVIDIA H200"; "cpu" for a CPU."""
    module = device_module(device)
    return "cpu" if module is None else str(module.get_device_name(device))


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, such as (9, 0); None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What the devices of ranks that compute together should have in common."""

    name: str
    """The product name; "cpu" for a CPU."""
    memory_gib: float | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None
    torch: str = torch.__version__

    @property
    def comparable(self) -> tuple[object, ...]:
        """Equal for devices of one kind. Memory counts in whole GiB, since a device may have lost some pages."""
        memory = None if self.memory_gib is None else round(self.memory_gib)
        return (self.name, memory, self.capability, self.driver, self.torch)

    def __str__(self) -> str:
        parts = [
            self.name,
            "" if self.memory_gib is None else f"{self.memory_gib:.1f} GiB",
            "" if self.capability is None else f"compute capability {'.'.join(map(str, self.capability))}",
            "" if self.driver is None else f"driver {self.driver}",
        ]
        return ", ".join(filter(None, parts))


def device_kind(device: torch.device) -> DeviceKind:
    """The kind of a device of this process."""
    module = device_module(device)
    if module is None:
        return DeviceKind(name="cpu")
    memory = module.get_device_properties(device).total_memory / GIB
    driver = driver_version() if device.type == "cuda" else None
    return DeviceKind(name=device_name(device), memory_gib=memory, capability=capability(device), driver=driver)


def free_gib(device: torch.device) -> float | None:
    """The memory of an accelerator that no process uses, in GiB; None for the CPU. Creates a context on the device."""
    module = device_module(device)
    return None if module is None else module.mem_get_info(device)[0] / GIB


def nccl_version() -> str | None:
    """The version of NCCL that this torch has; None without one."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def without_peer_access() -> list[tuple[int, int]]:
    """Pairs of CUDA devices of this process that cannot read each other's memory, and copy through the host."""
    count = num_accelerators() if accelerator().type == "cuda" else 0
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def has_expandable_segments() -> bool:
    """True if the environment lets the allocator grow its segments, which lowers fragmentation."""
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any("expandable_segments:True" in setting.replace(" ", "") for setting in settings)


def select(device: torch.device) -> None:
    """Make an accelerator the current one of this process. Does nothing for the CPU."""
    module = device_module(device)
    if module is not None:
        module.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the work of a device. Does nothing for the CPU."""
    module = device_module(device)
    if module is not None:
        module.synchronize(device)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """True for an NVIDIA GPU with products of FP8 matrices that have a scale for each row: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def devices_in_use() -> ModuleType | None:
    """The module of the accelerators if this process has used one. A question to it creates no context."""
    module = device_module(accelerator())
    return module if module is not None and module.is_initialized() else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. The host does not wait for the work of the device, unless the tensor comes to the CPU.

    The device may read a source in pinned memory later. Batches are values, so none is changed in place.
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on the CPU, for which the host waits once. A tensor of the CPU is returned as it is."""
    away = [tensor.device for tensor in tensors if tensor.device != CPU]
    if not away:
        return list(tensors)
    copies = [tensor.to(CPU, non_blocking=True) for tensor in tensors]
    wait_for(away)
    return copies


def wait_for(devices: Iterable[torch.device]) -> None:
    """Let the host wait for the current streams of devices, once for each. CPUs are left out."""
    for device in {*devices} - {CPU}:
        torch.get_device_module(device).current_stream(device).synchronize()


def host_buffer(shape: Sequence[int], dtype: torch.dtype, source: torch.device) -> Tensor:
    """An empty tensor of the host for copies from `source`. Only a copy to pinned memory is asynchronous on CUDA."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=source.type == "cuda")


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module in place. Copies to the CPU lie in pinned memory, and the host waits for them once.

    The host does not wait for copies to an accelerator. From pinned memory, the device fetches them by itself.
    """
    origins = {tensor.device for tensor in tensors_of(module).values()}
    module.to(device, non_blocking=True)
    if device == CPU:
        wait_for(origins)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name. A shared one is named once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def put_back(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let the parameters and buffers of a module have `tensors`, copies of theirs on another device, as their data."""
    there = {id(tensor): tensors[name] for name, tensor in tensors_of(module).items()}
    module._apply(lambda tensor: there[id(tensor)])  # type: ignore[no-untyped-call]


class HostRows:
    """Columns of rows [N, ...] that come to the host part by part. The host waits once, when it asks for them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.columns: list[Tensor] = []
        self.copied: torch.Event | None = None
        """Recorded behind the last copy."""

    def put(self, start: int, parts: Sequence[Tensor]) -> None:
        """Start to copy the rows from `start` on, a part of each column. All are copied in one stream of one device."""
        device = parts[0].device
        if not self.columns:
            self.columns = [host_buffer((self.count, *part.shape[1:]), part.dtype, device) for part in parts]
        for column, part in zip(self.columns, parts, strict=True):
            column[start : start + len(part)].copy_(part, non_blocking=True)
        module = device_module(device)
        if module is not None:
            self.copied = module.current_stream(device).record_event()

    def arrived(self) -> list[Tensor]:
        """The columns on the host, after a wait for their copies."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.columns
