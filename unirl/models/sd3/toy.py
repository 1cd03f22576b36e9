"""The toy checkpoint: the same classes, all three encoders and the VAE, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import toy_kl_config
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import clip_tokenizer, t5_tokenizer

_CLIP: dict[str, Any] = {
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
    "hidden_act": "gelu",
}

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 96,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 32,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    },
    "text_encoder": _CLIP,
    "text_encoder_2": _CLIP,
    "text_encoder_3": {
        "vocab_size": 98,
        "d_model": 96,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
        "decoder_start_token_id": 0,
    },
    "vae": toy_kl_config(1.5305, 0.0609),
}
TOY = ModelConfigs(components=_CONFIGS, scheduler={"shift": 3.0})


def toy_tokenizers() -> dict[str, Any]:
    """Character-level tokenizers by component name."""
    return {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer(), "tokenizer_3": t5_tokenizer()}
