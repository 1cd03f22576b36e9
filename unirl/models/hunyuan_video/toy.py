"""The toy checkpoints: the same classes, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.hunyuan_video.text import CROP_START, TEMPLATE
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import clip_tokenizer, qwen_tokenizer, with_pieces

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 32,
        "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 6, 6),
    },
    "text_encoder": {
        "vocab_size": 360,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    },
    "text_encoder_2": {
        "vocab_size": 514,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "projection_dim": 32,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
    },
    "vae": {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        "scaling_factor": 0.476986,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 4,
    },
}
_SCHEDULER = {"shift": 7.0}
TOY = ModelConfigs(components=_CONFIGS, scheduler=_SCHEDULER)
UNDISTILLED = ModelConfigs(
    components=_CONFIGS | {"transformer": _CONFIGS["transformer"] | {"guidance_embeds": False}}, scheduler=_SCHEDULER
)
"""One whose network reads no scale: it is guided as other models are."""


def toy_tokenizers() -> dict[str, Any]:
    """Of bytes; the prompt's template is as many tokens as it is to the real tokenizer."""
    system = TEMPLATE.partition("{}")[0]
    return {"tokenizer": with_pieces(qwen_tokenizer(), system, CROP_START), "tokenizer_2": clip_tokenizer()}
