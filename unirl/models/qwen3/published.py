"""Configurations of public Qwen3 checkpoints, so that a run can be planned without a connection."""

from __future__ import annotations

from typing import Any

_SHARED: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B-Base": _SHARED
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen/Qwen3-1.7B-Base": _SHARED
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen/Qwen3-4B-Base": _SHARED
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-8B-Base": _SHARED
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
