"""Facts about this machine on which the figures of a benchmark depend, and the rate of a large matrix product.

`python -m unirl.bench.probe` prints them as JSON, from a process that leaves no context on a device.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

CPU_FACTS = Path("/proc/cpuinfo")
SIDE, SIDE_ON_CPU = 8192, 1024
"""Rows and columns of the matrices of the product."""
PRODUCTS = 10


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a benchmark."""

    cpu: str
    """The processor by its own name."""
    cpus: int
    """Processors that this process may use."""
    main_memory_gib: float
    accelerator: str | None = None
    """The product name of an accelerator. None: the benchmark computes on the CPU."""
    accelerators: int = 0
    accelerator_gib: float | None = None
    dtype: str = ""
    """The dtype of the matrix product."""
    tflops: float | None = None
    """Rate of a large matrix product, in 1e12 operations per second. None: it was not measured."""


def main_memory_gib() -> float:
    """Memory of this machine in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def num_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_name() -> str:
    """The name of the processor, or its architecture where the system does not tell."""
    text = CPU_FACTS.read_text(encoding="utf-8", errors="replace") if CPU_FACTS.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large square matrix product, in 1e12 operations per second: the best of several."""
    import torch

    from unirl.types.device import synchronize

    side = SIDE_ON_CPU if device.type == "cpu" else SIDE
    matrix = torch.randn(side, side, device=device, dtype=dtype)

    def seconds() -> float:
        start = time.perf_counter()
        matrix @ matrix
        synchronize(device)
        return time.perf_counter() - start

    seconds()
    return 2 * side**3 / min(seconds() for _ in range(PRODUCTS)) / 1e12


def this_machine(dtype: str | None) -> Machine:
    """The facts of the machine of this process.

    Args:
        dtype: of the matrix product, `bf16` or `fp32`. None: it is not measured.
    """
    from unirl.types.device import accelerator, device_kind, num_accelerators
    from unirl.types.protocols import TORCH_DTYPES

    device = accelerator()
    kind = device_kind(device)
    return Machine(
        cpu=cpu_name(),
        cpus=num_cpus(),
        main_memory_gib=main_memory_gib(),
        accelerator=None if device.type == "cpu" else kind.name,
        accelerators=num_accelerators(),
        accelerator_gib=kind.memory_gib,
        dtype=dtype or "",
        tflops=None if dtype is None else matmul_rate(device, TORCH_DTYPES[dtype]),
    )


def probed(dtype: str | None) -> Machine:
    """`this_machine`, measured by a process of its own."""
    command = [sys.executable, "-m", "unirl.bench.probe", *([] if dtype is None else [dtype])]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(shown, type=Machine)


if __name__ == "__main__":
    print(json.dumps(asdict(this_machine(sys.argv[1] if len(sys.argv) > 1 else None))))
