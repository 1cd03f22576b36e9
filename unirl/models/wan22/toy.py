"""The toy checkpoints: the same classes, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.wan21.published import I2V, scheduler
from unirl.models.wan21.toy import SHOWN, TEXT_ENCODER, TRANSFORMER, VAE

SMALL_VAE: dict[str, Any] = VAE | {
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}
"""The layout of the 5B model's: residual, and twice as small along a side."""


def _experts(transformer: dict[str, Any], boundary_ratio: float, pipeline: str = "") -> ModelConfigs:
    return ModelConfigs(
        components={
            "transformer": transformer,
            "transformer_2": transformer,
            "text_encoder": TEXT_ENCODER,
            "vae": VAE,
        },
        scheduler=scheduler(3.0),
        settings={"boundary_ratio": boundary_ratio},
        pipeline=pipeline,
    )


TOY = _experts(TRANSFORMER, 0.875)
TOY_I2V = _experts(TRANSFORMER | SHOWN, 0.9, I2V)
TOY_TI2V = ModelConfigs(
    components={"transformer": TRANSFORMER, "text_encoder": TEXT_ENCODER, "vae": SMALL_VAE},
    scheduler=scheduler(5.0),
    settings={"expand_timesteps": True},
)
