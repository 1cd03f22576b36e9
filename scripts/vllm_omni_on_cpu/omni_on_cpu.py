"""Entry points by which vLLM-Omni and vLLM find the CPU. They take platforms from other packages in this way."""


def omni_platform() -> str:
    """The platform of vLLM-Omni."""
    return "omni_cpu_platform.CPUOmniPlatform"


def vllm_platform() -> str:
    """The platform of vLLM."""
    return "vllm.platforms.cpu.CpuPlatform"
