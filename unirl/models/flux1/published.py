"""Configurations of the public FLUX.1 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import kl_config
from unirl.models.loading.checkpoint import ModelConfigs

_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
}
_REST: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "projection_dim": 768,
        "hidden_act": "quick_gelu",
    },
    "text_encoder_2": {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    },
    "vae": kl_config(0.3611, 0.1159),
}
_DYNAMIC: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}

PUBLISHED: dict[str, ModelConfigs] = {
    "black-forest-labs/FLUX.1-dev": ModelConfigs(
        components={"transformer": _TRANSFORMER | {"guidance_embeds": True}, **_REST}, scheduler=_DYNAMIC
    ),
    "black-forest-labs/FLUX.1-schnell": ModelConfigs(
        components={"transformer": _TRANSFORMER | {"guidance_embeds": False}, **_REST}, scheduler={"shift": 1.0}
    ),
}
