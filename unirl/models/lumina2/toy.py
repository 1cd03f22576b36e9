"""The toy checkpoint: the same classes, tiny, with fixed random weights."""

from __future__ import annotations

from typing import Any

from unirl.models.denoising.vae import toy_kl_config
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.loading.toy_tokenizers import GEMMA_VOCABULARY, gemma_tokenizer, with_pieces
from unirl.models.lumina2.text import TEMPLATE

TEMPLATE_PIECES = 3

_CONFIGS: dict[str, Any] = {
    "transformer": {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "hidden_size": 24,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "axes_dim_rope": (4, 4, 4),
        "axes_lens": (64, 32, 32),
        "cap_feat_dim": 16,
    },
    "text_encoder": {
        "vocab_size": GEMMA_VOCABULARY + TEMPLATE_PIECES,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
    },
    "vae": toy_kl_config(0.3611, 0.1159),
}
TOY = ModelConfigs(components=_CONFIGS, scheduler={"shift": 6.0})


def toy_tokenizers() -> dict[str, Any]:
    """Gemma's over characters, to which the template of prompts is a few tokens."""
    return {"tokenizer": with_pieces(gemma_tokenizer(), TEMPLATE, TEMPLATE_PIECES)}
