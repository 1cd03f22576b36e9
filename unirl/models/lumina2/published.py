"""Configurations of the public Lumina-Image 2.0 checkpoint, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import kl_config
from unirl.models.loading.checkpoint import ModelConfigs

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "hidden_size": 2304,
        "num_layers": 26,
        "num_refiner_layers": 2,
        "num_attention_heads": 24,
        "num_kv_heads": 8,
        "multiple_of": 256,
        "axes_dim_rope": (32, 32, 32),
        "axes_lens": (300, 512, 512),
        "cap_feat_dim": 2304,
    },
    "text_encoder": {  # Gemma 2 of 2 B
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "vae": kl_config(0.3611, 0.1159),
}

PUBLISHED: dict[str, ModelConfigs] = {
    "Alpha-VLLM/Lumina-Image-2.0": ModelConfigs(components=_CONFIGS, scheduler={"shift": 6.0}),
}
