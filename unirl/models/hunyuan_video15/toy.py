"""The toy checkpoints: the same classes, as small as they get, with fixed random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unirl.models.hunyuan_video15.text import CROP_START, SYSTEM_MESSAGE
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import byt5_tokenizer, qwen_tokenizer, with_pieces

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "text_embed_dim": 32,
        "text_embed_2_dim": 32,
        "image_embed_dim": 12,
        "rope_axes_dim": (4, 6, 6),
        "target_size": 32,
        "task_type": "t2v",
    },
    "text_encoder": {
        "vocab_size": 360,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "use_sliding_window": False,
    },
    "text_encoder_2": {
        "vocab_size": 384,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    },
    "vae": {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 8, 8, 8),
        "layers_per_block": 1,
        "scaling_factor": 1.03682,
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
    },
}
GLYPH_TOKENS = 12
_TEMPLATE_TOKENS = 16
"""Of the chat around the system message, one token per byte."""

TOY = ModelConfigs(components=_CONFIGS, scheduler={"shift": 5.0}, guiders={"guider": {"guidance_scale": 6.0}})
DISTILLED = replace(TOY, guiders={"guider": {"guidance_scale": 1.0}})


def toy_tokenizers() -> dict[str, Any]:
    """Of bytes; the prompt's template is as many tokens as it is to the real tokenizer."""
    glyphs = byt5_tokenizer()
    glyphs.model_max_length = GLYPH_TOKENS
    prompts = with_pieces(qwen_tokenizer(), SYSTEM_MESSAGE, CROP_START - _TEMPLATE_TOKENS)
    return {"tokenizer": prompts, "tokenizer_2": glyphs}
