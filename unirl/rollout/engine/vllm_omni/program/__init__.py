"""The program of the server. It runs in the environment of vLLM-Omni, and needs torch, safetensors and vllm_omni."""
