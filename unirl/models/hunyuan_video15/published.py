"""Configurations of the public HunyuanVideo 1.5 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs

_TRANSFORMER: dict[str, Any] = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": (16, 56, 56),
    "task_type": "t2v",
}
_OTHERS: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
    },
    "text_encoder_2": {
        "vocab_size": 1510,
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    },
    "vae": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 32,
        "block_out_channels": (128, 256, 512, 1024, 1024),
        "layers_per_block": 2,
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
        "scaling_factor": 1.03682,
    },
}


def _checkpoint(target_size: int, shift: float) -> ModelConfigs:
    return ModelConfigs(
        components={"transformer": _TRANSFORMER | {"target_size": target_size}, **_OTHERS},
        scheduler={"shift": shift},
        guiders={"guider": {"guidance_scale": 6.0}},
    )


PUBLISHED: dict[str, ModelConfigs] = {
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": _checkpoint(640, 5.0),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": _checkpoint(960, 9.0),
}
