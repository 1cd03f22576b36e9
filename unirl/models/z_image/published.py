"""Configurations of the public Z-Image checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import kl_config
from unirl.models.loading.checkpoint import ModelConfigs

_CONFIGS: dict[str, dict[str, Any]] = {
    "transformer": {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 16,
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "cap_feat_dim": 2560,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": (32, 48, 48),
        "axes_lens": (1536, 512, 512),
    },
    "text_encoder": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "vae": kl_config(0.3611, 0.1159),
}
PUBLISHED: dict[str, ModelConfigs] = {
    "Tongyi-MAI/Z-Image": ModelConfigs(components=_CONFIGS, scheduler={"shift": 6.0}),
    "Tongyi-MAI/Z-Image-Turbo": ModelConfigs(components=_CONFIGS, scheduler={"shift": 3.0}),
}
