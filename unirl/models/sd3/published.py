"""Configurations of the public Stable Diffusion 3 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import kl_config
from unirl.models.loading.checkpoint import ModelConfigs

_CLIP: dict[str, Any] = {
    "vocab_size": 49408,
    "max_position_embeddings": 77,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "text_encoder": _CLIP
    | {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "projection_dim": 768,
        "hidden_act": "quick_gelu",
    },
    "text_encoder_2": _CLIP
    | {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
        "hidden_act": "gelu",
    },
    "text_encoder_3": {
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
}
_VAE: dict[str, Any] = kl_config(1.5305, 0.0609)
_MMDIT: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}


def _checkpoint(**transformer: Any) -> ModelConfigs:
    return ModelConfigs(
        components={"transformer": _MMDIT | transformer, **_ENCODERS, "vae": _VAE}, scheduler={"shift": 3.0}
    )


PUBLISHED: dict[str, ModelConfigs] = {
    "stabilityai/stable-diffusion-3-medium-diffusers": _checkpoint(
        num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192
    ),
    "stabilityai/stable-diffusion-3.5-medium": _checkpoint(
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    ),
    "stabilityai/stable-diffusion-3.5-large": _checkpoint(
        num_layers=38,
        num_attention_heads=38,
        caption_projection_dim=2432,
        pos_embed_max_size=192,
        qk_norm="rms_norm",
    ),
}
