"""Data sheets of the devices that plans are made for. Every figure is a vendor's, without sparsity.

    A100-80  NVIDIA A100 80GB SXM: nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
             nvidia-a100-datasheet-nvidia-us-2188504-web.pdf. BF16 312 TFLOP/s, FP32 19.5, 2,039 GB/s, NVLink 600 GB/s
             Network: DGX A100 data sheet, eight ConnectX-6 of 200 Gb/s for eight GPUs
    H100     NVIDIA H100 SXM: resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306. BF16 1,979 TFLOP/s with
             sparsity, FP32 67, 3.35 TB/s, NVLink 900 GB/s
             Network: DGX H100 data sheet, eight ConnectX-7 of 400 Gb/s for eight GPUs
    H200     NVIDIA H200 SXM: nvidia.com/en-us/data-center/h200. The rates of an H100, 141 GB, 4.8 TB/s
             Network: DGX H200 data sheet, as DGX H100
    B200     NVIDIA HGX B200, an eighth: nvidia.com/en-us/data-center/hgx. FP16/BF16 36 PFLOP/s with sparsity, FP32 600
             TFLOP/s, 1.44 TB, 62 TB/s, NVLink 1.8 TB/s per GPU
             Network: DGX B200 data sheet, eight ConnectX-7 of 400 Gb/s for eight GPUs
    4090     NVIDIA Ada GPU architecture whitepaper, appendix A: FP16 with FP32 accumulate 165.2 TFLOP/s, FP32 82.6,
             1,008 GB/s, PCIe 4.0 x16
             Network: assumed, one adapter of 100 Gb/s for eight GPUs
    L40S     NVIDIA L40S: nvidia.com/en-us/data-center/l40s. BF16 362.05 TFLOP/s (733 with sparsity), FP32 91.6,
             864 GB/s, PCIe 4.0 x16
             Network: assumed, one adapter of 100 Gb/s for eight GPUs

Rates with sparsity are halved. `memory_gib` is what the driver reports, which is a little less than the product's name
says. `interconnect` is what one device receives: half of NVLink's bandwidth in both directions, or that of PCIe 4.0 x16
in one. `launch_s` is the time of the host for one operation of eager PyTorch, autograd included. It depends on the host
more than on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from unirl.config.errors import UsageError, did_you_mean

GIB = 2**30
MATMUL_EFFICIENCY = 0.8
"""Fraction of the vendor's rate that large matrix products reach: 790 of 989 TFLOP/s."""
MEMORY_EFFICIENCY = 0.9
"""Fraction of the vendor's bandwidth that a copy reaches: 4.3 of 4.8 TB/s."""
HOST_BANDWIDTH = 2.5e10
"""Bytes per second between pinned main memory and a device: four fifths of PCIe 4.0 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The rates of one device."""

    name: str
    words: str
    """How the driver names such devices, in part."""
    bf16: float
    """Operations per second of dense matrix products."""
    fp32: float
    """The same without tensor cores, in which fp32 is computed by default."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory_gib: float
    interconnect: float
    """Bytes per second that it receives from other devices of the machine."""
    network: float
    """Bytes per second that it receives from other machines: its share of the network adapters."""
    launch_s: float = 5e-6

    def compute_s(self, flops: float, dtype_bytes: int = 2) -> float:
        """Seconds for so many operations of matrix products."""
        return flops / (MATMUL_EFFICIENCY * (self.fp32 if dtype_bytes == 4 else self.bf16))

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return num_bytes / (MEMORY_EFFICIENCY * self.bandwidth)


DEVICES = (
    Device(
        name="a100",
        words="A100",
        bf16=312e12,
        fp32=19.5e12,
        bandwidth=2.039e12,
        memory_gib=80.0,
        interconnect=300e9,
        network=25e9,
    ),
    Device(
        name="h100",
        words="H100",
        bf16=989e12,
        fp32=67e12,
        bandwidth=3.35e12,
        memory_gib=79.6,
        interconnect=450e9,
        network=50e9,
    ),
    Device(
        name="h200",
        words="H200",
        bf16=989e12,
        fp32=67e12,
        bandwidth=4.8e12,
        memory_gib=140.4,
        interconnect=450e9,
        network=50e9,
    ),
    Device(
        name="b200",
        words="B200",
        bf16=2250e12,
        fp32=75e12,
        bandwidth=7.7e12,
        memory_gib=179.1,
        interconnect=900e9,
        network=50e9,
    ),
    Device(
        name="4090",
        words="RTX 4090",
        bf16=165.2e12,
        fp32=82.6e12,
        bandwidth=1.008e12,
        memory_gib=24.0,
        interconnect=32e9,
        network=1.5625e9,
    ),
    Device(
        name="l40s",
        words="L40S",
        bf16=362e12,
        fp32=91.6e12,
        bandwidth=0.864e12,
        memory_gib=45.0,
        interconnect=32e9,
        network=1.5625e9,
    ),
)
DEFAULT = "h100"


def device_named(name: str | None) -> tuple[Device, str]:
    """A device of the table, and a sentence about the choice if nobody made it.

    Args:
        name: a name of the table. None: this machine's device, or else the default.

    Raises:
        UsageError: 2001 for a name that is not in the table.
    """
    names = {device.name: device for device in DEVICES}
    if name is not None:
        if name.lower() not in names:
            raise UsageError(
                f"--device {name}: there is no such device in the table.{did_you_mean(name, names)} "
                f"Devices: {', '.join(names)}"
            )
        return names[name.lower()], ""
    here = own_device_name()
    if here is None:
        return names[DEFAULT], f"this machine has no GPU, so the figures are for {DEFAULT} (--device NAME)"
    known = device_like(here)
    if known is None:
        return names[DEFAULT], f"{here} is not in the table, so the figures are for {DEFAULT} (--device NAME)"
    return known, ""


def device_like(driver_name: str) -> Device | None:
    """The device of the table that the driver calls so. None if the table has none."""
    return next((device for device in DEVICES if device.words in driver_name), None)


def own_device_name() -> str | None:
    """The name that the driver gives to this machine's first device. None without a GPU."""
    from unirl.types.device import accelerator, device_name

    device = accelerator()
    return None if device.type == "cpu" else device_name(device)
