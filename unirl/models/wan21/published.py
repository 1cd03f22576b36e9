"""Configurations of the public Wan 2.1 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs

TRANSFORMER_14B: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
TRANSFORMER_1_3B = TRANSFORMER_14B | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
UMT5_XXL: dict[str, Any] = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
CLIP_VIT_H: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}
VAE: dict[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}
I2V = "WanImageToVideoPipeline"


def scheduler(flow_shift: float) -> dict[str, Any]:
    """UniPC with flow sigmas."""
    return {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": flow_shift,
        "num_train_timesteps": 1000,
    }


def _text_to_video(transformer: dict[str, Any]) -> ModelConfigs:
    return ModelConfigs(
        components={"transformer": transformer, "text_encoder": UMT5_XXL, "vae": VAE}, scheduler=scheduler(3.0)
    )


def _image_to_video(flow_shift: float) -> ModelConfigs:
    return ModelConfigs(
        components={
            "transformer": TRANSFORMER_14B | {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
            "text_encoder": UMT5_XXL,
            "image_encoder": CLIP_VIT_H,
            "vae": VAE,
        },
        scheduler=scheduler(flow_shift),
        pipeline=I2V,
    )


PUBLISHED: dict[str, ModelConfigs] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _text_to_video(TRANSFORMER_1_3B),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _text_to_video(TRANSFORMER_14B),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _image_to_video(3.0),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _image_to_video(5.0),
}
