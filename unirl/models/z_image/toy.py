"""The toy checkpoint: the same classes, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import toy_kl_config
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import QWEN_VOCABULARY, qwen_tokenizer

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "qk_norm": True,
        "cap_feat_dim": 32,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": (8, 4, 4),
        "axes_lens": (256, 32, 32),
    },
    "text_encoder": {
        "vocab_size": QWEN_VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    },
    "vae": toy_kl_config(0.3611, 0.1159),
}
TOY = ModelConfigs(components=_CONFIGS, scheduler={"shift": 6.0})


def toy_tokenizers() -> dict[str, Any]:
    """Of bytes."""
    return {"tokenizer": qwen_tokenizer()}
