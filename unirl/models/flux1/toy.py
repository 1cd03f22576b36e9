"""The toy checkpoints: the same classes, tiny, with fixed random weights; with and without an embedded guidance."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import toy_kl_config
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import CLIP_VOCABULARY, T5_VOCABULARY, clip_tokenizer, t5_tokenizer

_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (2, 2, 4),
}
_REST: dict[str, Any] = {
    "text_encoder": {
        "vocab_size": CLIP_VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "bos_token_id": 512,
        "eos_token_id": 513,
        "pad_token_id": 513,
        "hidden_act": "gelu",
    },
    "text_encoder_2": {
        "vocab_size": T5_VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    },
    "vae": toy_kl_config(0.3611, 0.1159),
}
TOY = ModelConfigs(
    components={"transformer": _TRANSFORMER | {"guidance_embeds": True}, **_REST},
    scheduler={"shift": 3.0, "use_dynamic_shifting": True},
)
SCHNELL = ModelConfigs(
    components={"transformer": _TRANSFORMER | {"guidance_embeds": False}, **_REST}, scheduler={"shift": 1.0}
)


def toy_tokenizers() -> dict[str, Any]:
    """Character-level tokenizers by component name."""
    return {"tokenizer": clip_tokenizer(), "tokenizer_2": t5_tokenizer()}
