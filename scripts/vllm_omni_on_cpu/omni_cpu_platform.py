"""A CPU as a platform of vLLM-Omni 0.30.0, which has none, for tests with tiny models.

Attention is that of torch. The CPU kernels of vLLM are not in its wheel for GPUs; the one that is needed is made here.
"""

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

GIB = 2**30


class CPUOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        return "omni_cpu_attention.CPUBackend"

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def synchronize(cls):
        pass

    @classmethod
    def empty_cache(cls):
        pass

    @classmethod
    def record_device_event(cls):
        return None

    @classmethod
    def reset_peak_memory_stats(cls, device=None):
        pass

    @classmethod
    def max_memory_reserved(cls, device=None):
        return 0

    @classmethod
    def max_memory_allocated(cls, device=None):
        return 0

    @classmethod
    def get_free_memory(cls, device=None):
        return 8 * GIB

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 16 * GIB


KERNELS = torch.library.Library("_C", "FRAGMENT")
KERNELS.define("gelu_new(Tensor! out, Tensor input) -> ()")
KERNELS.impl("gelu_new", lambda out, x: out.copy_(torch.nn.functional.gelu(x, approximate="tanh")) and None, "CPU")
