"""Configurations of the public Wan 2.2 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.wan21.published import I2V, TRANSFORMER_14B, UMT5_XXL, VAE, scheduler

TRANSFORMER_5B: dict[str, Any] = TRANSFORMER_14B | {
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
VAE_5B: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}


def _experts(transformer: dict[str, Any], boundary_ratio: float, pipeline: str = "") -> ModelConfigs:
    return ModelConfigs(
        components={"transformer": transformer, "transformer_2": transformer, "text_encoder": UMT5_XXL, "vae": VAE},
        scheduler=scheduler(3.0),
        settings={"boundary_ratio": boundary_ratio},
        pipeline=pipeline,
    )


PUBLISHED: dict[str, ModelConfigs] = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _experts(TRANSFORMER_14B, 0.875),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _experts(TRANSFORMER_14B | {"in_channels": 36}, 0.9, I2V),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ModelConfigs(
        components={"transformer": TRANSFORMER_5B, "text_encoder": UMT5_XXL, "vae": VAE_5B},
        scheduler=scheduler(5.0),
        settings={"expand_timesteps": True},
    ),
}
