"""Configurations of the public Qwen-Image checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.qwen_image.toy import SCHEDULER
from unirl.models.qwen_vl.published import PUBLISHED as QWEN_VL

_TRANSFORMER: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
_VAE: dict[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}


def published_checkpoint(pipeline: str = "", **transformer: Any) -> ModelConfigs:
    """One of the 20B, with what its transformer's configuration says besides."""
    configs = {
        "transformer": _TRANSFORMER | transformer,
        "text_encoder": QWEN_VL["Qwen/Qwen2.5-VL-7B-Instruct"],
        "vae": _VAE,
    }
    return ModelConfigs(components=configs, scheduler=SCHEDULER, pipeline=pipeline)


PUBLISHED: dict[str, ModelConfigs] = {
    "Qwen/Qwen-Image": published_checkpoint(),
    "Qwen/Qwen-Image-2512": published_checkpoint(),
}
