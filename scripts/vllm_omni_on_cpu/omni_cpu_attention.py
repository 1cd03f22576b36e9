"""Attention of torch for a CPU. vLLM-Omni has it for GPUs, and calls it by the kind of the platform."""

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CPUImpl(SDPAImpl):
    def forward(self, query, key, value, attn_metadata=None):
        return self.forward_cuda(query, key, value, attn_metadata)


class CPUBackend(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return CPUImpl
