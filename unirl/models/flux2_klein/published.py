"""Configurations of the public FLUX.2-klein checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

from unirl.models.loading.checkpoint import ModelConfigs

_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 128,
    "attention_head_dim": 128,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_VAE: dict[str, Any] = {
    "sample_size": 1024,
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 32,
    "batch_norm_eps": 1e-4,
    "patch_size": (2, 2),
}
_SCHEDULER: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
_SMALL: dict[str, dict[str, Any]] = {
    "transformer": _TRANSFORMER
    | {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680},
    "text_encoder": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "vae": _VAE,
}
_LARGE: dict[str, dict[str, Any]] = {
    "transformer": _TRANSFORMER
    | {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288},
    "text_encoder": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "vae": _VAE,
}


def _checkpoint(configs: dict[str, dict[str, Any]], *, is_distilled: bool) -> ModelConfigs:
    return ModelConfigs(components=configs, scheduler=_SCHEDULER, settings={"is_distilled": is_distilled})


PUBLISHED: dict[str, ModelConfigs] = {
    "black-forest-labs/FLUX.2-klein-base-4B": _checkpoint(_SMALL, is_distilled=False),
    "black-forest-labs/FLUX.2-klein-base-9B": _checkpoint(_LARGE, is_distilled=False),
    "black-forest-labs/FLUX.2-klein-4B": _checkpoint(_SMALL, is_distilled=True),
    "black-forest-labs/FLUX.2-klein-9B": _checkpoint(_LARGE, is_distilled=True),
}
